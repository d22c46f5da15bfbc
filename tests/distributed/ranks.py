"""Starts ranks from a preloaded forkserver: torch and transformers are imported once for all tests."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tasks.contracts import Plan, Precision, Resolved, TrainReport
from tasks.params import Params
from tasks.paths import Paths
from tasks.trainer.run_state import StepLog, StepRecord

PRELOAD = ["torch", "transformers", "peft", "pyarrow", "tasks.trainer.loop", "tasks.trainer.torch_engine"]
TIMEOUT_SECONDS = 240
GRACE_SECONDS = 5  # in which the others may say what they met


@dataclass(frozen=True)
class Trained:
    run: Path
    records: list[StepRecord]

    @property
    def report(self) -> TrainReport:
        return TrainReport.read(self.run / "finished" / "final" / "train_report.json")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _rank_main(
    rank: int, world: int, port: int, work: Callable[..., None], arguments: tuple[object, ...], errors: object
) -> None:
    os.environ.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    )
    import torch

    torch.set_num_threads(1)
    try:
        work(*arguments)
    except BaseException:
        errors.put(traceback.format_exc())  # type: ignore[attr-defined]
        raise


def run_ranks(world: int, work: Callable[..., None], *arguments: object, code: int = 0) -> None:
    """Runs `work(*arguments)`, a module's function, in `world` ranks with torchrun's variables; all end with `code`."""
    context = multiprocessing.get_context("forkserver")
    # What is preloaded may look at a GPU (bitsandbytes does), and no process forked from such a one can use it.
    context.set_forkserver_preload([] if torch.cuda.is_available() else PRELOAD)
    errors = context.Queue()
    port = free_port()
    ranks = [
        context.Process(target=_rank_main, args=(rank, world, port, work, arguments, errors))
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    _wait(ranks, code)
    said = []
    while not errors.empty():
        said.append(errors.get())
    codes = [rank.exitcode for rank in ranks]
    assert codes == [code] * world, f"exit codes {codes}\n{''.join(said)}"


def _wait(ranks: list[Any], code: int) -> None:
    """Until all have ended; one that failed may leave others waiting for it, which are killed as torchrun would."""
    end = time.monotonic() + TIMEOUT_SECONDS
    while any(rank.is_alive() for rank in ranks) and time.monotonic() < end:
        if any(rank.exitcode not in (None, code) for rank in ranks):
            end = min(end, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.02)
    for rank in ranks:
        if rank.is_alive():
            rank.kill()
        rank.join()


def _train_rank(root: str, run_key: str, stop_at: int | None) -> None:
    from tasks.params import read_params
    from tasks.trainer import worker
    from tasks.trainer.guards import StopSignals

    os.chdir(root)
    signals = StopSignals()
    if stop_at is not None:
        _stop_after(stop_at)
    worker.train_rank(
        read_params(Path(root) / "params.yaml"), Paths(Path(root)), Path(root) / "runs" / run_key, signals
    )


def _stop_after(steps: int) -> None:
    """Sends this rank a real SIGTERM as it logs its step number `steps`, however fast steps are."""
    import signal

    append = StepLog.append

    def append_and_stop(log: StepLog, record: StepRecord) -> None:
        append(log, record)
        if record.step == steps:
            os.kill(os.getpid(), signal.SIGTERM)

    if os.environ["RANK"] == "0":
        StepLog.append = append_and_stop  # type: ignore[method-assign]


def train(
    root: Path,
    params: Params,
    plan: Plan,
    precision: Precision = "float32",
    run_key: str = "test",
    stop_at: int | None = None,
    fresh: bool = True,
) -> Trained:
    """Trains the workspace `root` (base and prepared data in place) under `plan` with real gloo ranks."""
    from tasks.trainer.worker import WorkerOrder

    run = root / "runs" / run_key
    if fresh:
        shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True, exist_ok=True)
    WorkerOrder(
        run_key=run_key, plan=plan, resolved=Resolved(precision=precision, token_budget=None), starts=1
    ).write(run / "order.json")
    code = 75 if stop_at is not None else 0
    run_ranks(plan.processes, _train_rank, str(root), run_key, stop_at, code=code)
    return Trained(run, StepLog(run).read())
