"""kill -9 at a random moment, then `dvc repro`: the weights must equal an uninterrupted run's, bit for bit."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch

from tests.pipeline.workspace import Workspace

# who is killed -> what its command line holds
VICTIMS = {
    "worker": "tasks.trainer.worker",
    "train stage": "tasks.train",
    "flow": "elastane",
}


@dataclass(frozen=True)
class Kill:
    """One fault and what came of it. Steps are those logged when the victim died, None before training."""

    victim: str
    ranks: int
    seconds_after_start: float
    step_at_death: int
    left_behind: int
    equal: bool


def processes(workspace: Workspace, pattern: str) -> list[psutil.Process]:
    """Live processes working in this workspace whose command line holds `pattern` as a word."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd", "status"]):
        line = process.info["cmdline"] or []
        if pattern == VICTIMS["worker"] and any("torch.distributed" in part for part in line):
            continue  # torchrun's agent names the worker's module too
        here = process.info["cwd"] == str(workspace.root) and process.info["status"] != psutil.STATUS_ZOMBIE
        if here and any(part == pattern or Path(part).name == pattern for part in line):
            found.append(process)
    return found


def forget_training(workspace: Workspace) -> None:
    """Back to before the train stage: no runs, no trained model, no memory of either in DVC."""
    shutil.rmtree(workspace.root / "runs", ignore_errors=True)
    shutil.rmtree(workspace.root / "checkpoints", ignore_errors=True)
    shutil.rmtree(workspace.root / ".dvc" / "cache" / "runs", ignore_errors=True)
    for name in ("train_report.json", "train_performance.json", "train_curves.csv", "eval_report.json"):
        (workspace.root / "reports" / name).unlink(missing_ok=True)


def steps_logged(workspace: Workspace) -> int:
    return sum(len(log.read_text().splitlines()) for log in workspace.root.glob("runs/*/steps.jsonl"))


def kill_once(workspace: Workspace, victim: str, ranks: int, draw: random.Random, reference: dict) -> Kill:
    """Starts the pipeline, kills `victim` at a random moment of its life, repairs by `dvc repro`, compares."""
    forget_training(workspace)
    command = ["elastane", "run"] if victim == "flow" else ["dvc", "repro"]
    running = subprocess.Popen(
        command,
        cwd=workspace.root,
        env=workspace.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    begin = time.monotonic()
    wait_until(lambda: bool(processes(workspace, "tasks.train")) or running.poll() is not None, 120)
    if victim == "worker":
        wait_until(lambda: bool(processes(workspace, VICTIMS[victim])) or running.poll() is not None, 60)
    # Half of the kills fall before or at the first steps, half in the midst of training and saving.
    if draw.random() < 0.5:
        wait_until(lambda: steps_logged(workspace) > 0 or running.poll() is not None, 60)
        time.sleep(draw.uniform(0, 1.5))
    else:
        time.sleep(draw.uniform(0, 6))
    at, step = time.monotonic() - begin, steps_logged(workspace)
    for process in processes(workspace, VICTIMS[victim]):
        process.send_signal(signal.SIGKILL)
    if victim == "flow":
        running.kill()
    running.wait(timeout=120)
    time.sleep(2)
    left = sum(len(processes(workspace, name)) for name in ("tasks.train", "tasks.trainer.worker"))
    workspace.must("dvc", "repro", "-q")
    weights = workspace.weights()
    equal = weights.keys() == reference.keys() and all(
        torch.equal(weights[k], reference[k]) for k in reference
    )
    return Kill(victim, ranks, round(at, 2), step, left, equal)


def wait_until(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)


def as_rows(kills: list[Kill]) -> list[dict]:
    return [asdict(kill) for kill in kills]
