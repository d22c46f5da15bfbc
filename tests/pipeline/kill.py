"""kill -9 at a drawn moment, then `dvc repro`: the weights must equal an uninterrupted run's, bit for bit."""

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

from tasks.contracts import TrainReport
from tests.pipeline.workspace import Workspace

# who is killed -> what its command line holds
VICTIMS = {
    "worker": "tasks.trainer.worker",
    "train stage": "tasks.train",
    "flow": "elastane",
}
BEFORE_TRAINING = 0.25  # share of kills that fall between the stage's start and the first step
LOADING_SECONDS = 5.0


@dataclass(frozen=True)
class Kill:
    """One fault and what came of it.

    `drawn_step` is the step after which it was to fall, None before training; `step_at_death` is how many of
    `steps` were logged when all was dead.
    """

    victim: str
    ranks: int
    steps: int
    drawn_step: int | None
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
    """Starts the pipeline, kills `victim` at a drawn moment, repairs by `dvc repro`, compares.

    The workspace must have been trained under its recipe: from there it is known how many steps that takes.
    """
    steps = TrainReport.read(workspace.root / "reports" / "train_report.json").steps
    drawn = None if draw.random() < BEFORE_TRAINING else draw.randrange(1, steps)
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
    for pattern in ("tasks.train", VICTIMS[victim]):
        wait_until(lambda name=pattern: running.poll() is not None or processes(workspace, name), 120)
    if drawn is None:
        time.sleep(draw.uniform(0, LOADING_SECONDS))
    else:
        wait_until(lambda: running.poll() is not None or steps_logged(workspace) > 0, 120)
    # Looked for before the last wait, since looking takes longer than a step.
    condemned = processes(workspace, VICTIMS[victim])
    assert condemned, f"no {victim} is left to kill"
    wait_until(lambda: running.poll() is not None or steps_logged(workspace) >= (drawn or 0), 120, 0.002)
    at = time.monotonic() - begin
    for process in condemned:
        process.send_signal(signal.SIGKILL)
    running.wait(timeout=120)
    time.sleep(2)
    died_at = steps_logged(workspace)
    left = sum(len(processes(workspace, name)) for name in ("tasks.train", "tasks.trainer.worker"))
    workspace.must("dvc", "repro", "-q")
    weights = workspace.weights()
    equal = weights.keys() == reference.keys() and all(
        torch.equal(weights[k], reference[k]) for k in reference
    )
    return Kill(victim, ranks, steps, drawn, round(at, 2), died_at, left, equal)


def wait_until(condition, seconds: float, interval: float = 0.05) -> None:
    """Waits until `condition()` holds, asked every `interval` seconds; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(interval)


def as_rows(kills: list[Kill]) -> list[dict]:
    return [asdict(kill) for kill in kills]
