"""What keeps a run alone and alive: its lock, its signals, and a stop at numbers that are none."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tasks.errors import UserError
from tasks.locks import held_alone, share, taken_alone

WAIT_FOR_OLD_WORKERS_SECONDS = 30.0


@contextmanager
def run_lock(run: Path) -> Iterator[None]:
    """Holds `run` for one train stage.

    Raises:
        UserError: another train stage holds it.
    """
    with held_alone(
        run / "train.lock",
        lambda holder: f"process {holder} is already training run {run.name}; wait for it, or stop it",
    ):
        wait_for_workers(run)
        yield


def wait_for_workers(run: Path) -> None:
    """Waits until no worker of an earlier, killed train stage is left.

    Raises:
        UserError: one is still there after half a minute.
    """
    deadline = time.monotonic() + WAIT_FOR_OLD_WORKERS_SECONDS
    with (run / "workers.lock").open("a+") as file:
        while not taken_alone(file):
            if time.monotonic() > deadline:
                raise UserError(
                    f"workers of an earlier start of run {run.name} are still alive; "
                    "end them (they are called tasks.trainer.worker) and start again"
                )
            time.sleep(0.2)


def hold_as_worker(run: Path) -> IO[str]:
    """Shows, as long as the returned file is open, that a worker of `run` is alive."""
    return share(run / "workers.lock")


class StopSignals:
    """Remembers SIGTERM and SIGUSR1 (schedulers' pre-emption): save first, then end."""

    def __init__(self) -> None:
        self.received: int | None = None
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.received = number


def check_finite(loss: float, grad_norm: float, step: int, precision: str, saved: int = 0) -> None:
    """Raises when a step produced no numbers: going on would train nothing.

    A non-finite gradient norm alone is normal under float16, whose scaler skips the step.

    Args:
        saved: the step of the newest checkpoint, which stays; 0 if there is none.
    """
    if math.isfinite(loss) and (math.isfinite(grad_norm) or precision == "float16"):
        return
    wider = {"float16": "bfloat16 or float32", "bfloat16": "float32"}.get(precision)
    other = f", or use train.precision={wider}" if wider else ""
    kept = f" (the checkpoint of step {saved} is kept)" if saved else ""
    raise UserError(
        f"step {step}: loss={loss}, gradient norm={grad_norm}, and training cannot go on from that{kept}; "
        f"lower train.learning_rate{other}"
    )
