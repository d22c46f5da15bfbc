"""Trains a recipe's first steps under one plan: the real workers, in a folder that is thrown away."""

from __future__ import annotations

import os
import re
import select
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from ruamel.yaml import YAML
from safetensors import safe_open

import tasks
from tasks.commands.certify_names import NotRun
from tasks.contracts import HardwareProfile, Plan, Precision, Resolved
from tasks.data.order import SampleOrder
from tasks.data.packing import training_rows
from tasks.params import Params, read_params
from tasks.paths import Paths
from tasks.stage import heartbeat
from tasks.train import launch
from tasks.trainer.run_state import StepLog, StepRecord
from tasks.trainer.worker import WorkerOrder

# What a run writes, and so must not be the workspace's own.
WRITTEN = {"params.yaml", "runs", "reports", "checkpoints", "mlflow.db", "mlartifacts", ".git", ".dvc"}
SAVE_NEVER_SECONDS = 1e9
KEPT_OUTPUT_BYTES = 200_000
# The first error is the cause; torchrun's own, and those of ranks that waited for the failed one, come after it.
ERROR_LINE = re.compile(
    r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b: .*)$", re.MULTILINE
)


@dataclass(frozen=True)
class Subject:
    """A recipe with its rows prepared. `model` names it among several, `what` says it in words."""

    model: str
    what: str
    params: Params
    paths: Paths
    run_key: str | None = None


class Weights(Mapping[str, torch.Tensor]):
    """Exported weights by name, read a tensor at a time: two whole models need not fit in memory."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Path] = {}
        for path in sorted(folder.rglob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                self._files.update(dict.fromkeys(file.keys(), path))

    def __getitem__(self, name: str) -> torch.Tensor:
        with safe_open(self._files[name], framework="pt") as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


@dataclass(frozen=True)
class Run:
    plan: Plan
    records: list[StepRecord]
    weights: Mapping[str, torch.Tensor]


@contextmanager
def bench(subject: Subject, steps: int) -> Iterator[Paths]:
    """A folder with everything of the recipe's but what training writes; it trains `steps` steps and is removed.

    It lies beside the runs, where there is room for checkpoints.
    """
    subject.paths.runs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="certify-", dir=subject.paths.runs) as name:
        root = Path(name)
        for entry in subject.paths.root.iterdir():  # models and rows may lie anywhere in the workspace
            if entry.name not in WRITTEN:
                (root / entry.name).symlink_to(entry)
        if not (root / "tasks").exists():
            (root / "tasks").symlink_to(Path(tasks.__file__).parent)
        raw = subject.params.model_dump(by_alias=True, mode="json")
        lengths = training_rows(subject.paths.prepared).lengths()
        order = SampleOrder.of(subject.params, lengths)
        raw["train"]["num_train_epochs"] = steps / order.steps_per_epoch
        raw["train"]["checkpoint_every_seconds"] = SAVE_NEVER_SECONDS
        raw["register"]["tracking_uri"] = f"sqlite:///{root / 'mlflow.db'}"
        with (root / "params.yaml").open("w", encoding="utf-8") as file:
            YAML(typ="safe").dump(raw, file)
        read_params(root / "params.yaml")
        yield Paths(root)


def train_under(
    here: Paths, name: str, plan: Plan, precision: Precision, hardware: HardwareProfile
) -> Run | NotRun:
    """Trains from the base's checkpoint; what is left of the run in the folder is its weights."""
    run = here.run(f"certify-{name}")
    run.mkdir(parents=True)
    resolved = Resolved(precision=precision, token_budget=None)
    WorkerOrder(run_key=run.name, plan=plan, resolved=resolved, starts=1).write(run / "order.json")
    hardware.write(here.hardware)
    with heartbeat(f"certify: {name}, {plan.processes} process(es)"):
        code, said = start_workers(plan, hardware, run, here)
    if (run / "user_error").is_file():
        return NotRun((run / "user_error").read_text(encoding="utf-8"), started=True)
    if code:
        error = ERROR_LINE.search(said)
        why = error.group(1) if error else "their output is above"
        return NotRun(f"its workers ended with code {code}: {why}", started=True)
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    return Run(plan, StepLog(run).read(), Weights(run / "finished" / "final"))


def forget(here: Paths, name: str) -> None:
    """Makes room: the run was compared."""
    shutil.rmtree(here.run(f"certify-{name}"), ignore_errors=True)


def start_workers(plan: Plan, hardware: HardwareProfile, run: Path, here: Paths) -> tuple[int, str]:
    """torchrun's exit code, and what it and its workers said."""
    with overheard() as said:
        code = launch(plan, hardware, run, here)
    return code, said.decode("utf-8", errors="replace")


@contextmanager
def overheard() -> Iterator[bytearray]:
    """What processes started in this time write is kept, and goes on to stderr (stdout is for the result)."""
    sys.stdout.flush()
    sys.stderr.flush()
    out, err = os.dup(1), os.dup(2)
    reading, writing = os.pipe()
    said, over = bytearray(), threading.Event()

    def pass_on() -> None:
        # Not until its end: a process that outlives its parent may hold the pipe open.
        while select.select([reading], [], [], 0.1)[0] or not over.is_set():
            if not select.select([reading], [], [], 0)[0]:
                continue
            chunk = os.read(reading, 65536)
            if not chunk:
                return
            said.extend(chunk)
            del said[:-KEPT_OUTPUT_BYTES]
            os.write(err, chunk)

    thread = threading.Thread(target=pass_on, daemon=True)
    thread.start()
    try:
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        os.close(writing)
        yield said
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(out, 1)
        os.dup2(err, 2)
        over.set()
        thread.join()
        for number in (out, err, reading):
            os.close(number)


def initial_weights(params: Params, paths: Paths, precision: Precision) -> dict[str, torch.Tensor]:
    """What every run began with, by the names of the export."""
    from peft import get_peft_model_state_dict

    from tasks.trainer.adapters import attach_adapters
    from tasks.trainer.loading import DTYPES, load_base, stored_precision

    full = params.train.finetuning_type == "full"
    held = DTYPES[stored_precision(params.train.finetuning_type, precision)]
    model = attach_adapters(load_base(paths, held), params.train, params.seed)
    tables = params.train.lora.train_embeddings
    state: dict[str, torch.Tensor] = (
        model.state_dict() if full else get_peft_model_state_dict(model, save_embedding_layers=tables)
    )
    return {name: value.detach() for name, value in state.items()}
