"""What every stage shares: its `main`, its status file, and that it never outlives its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from tasks.contracts import StageStatus
from tasks.errors import USER_ERROR_EXIT_CODE, UserError
from tasks.params import Params, read_params
from tasks.paths import Paths

if TYPE_CHECKING:
    from tqdm import tqdm

PR_SET_PDEATHSIG = 1
HEARTBEAT_SECONDS = 5.0


def say(text: str) -> None:
    """One line to the user, at once (stdout is kept for results)."""
    print(text, file=sys.stderr, flush=True)


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent dies (Linux; elsewhere nothing happens).

    After kill -9 of dvc or of the flow no trainer may stay behind on the GPU.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def heartbeat(what: str) -> Iterator[None]:
    """Says `what` now and again every few seconds while a silent step runs."""
    done = threading.Event()
    start = time.monotonic()

    def beat() -> None:
        while not done.wait(HEARTBEAT_SECONDS):
            say(f"  … {what}: {time.monotonic() - start:.0f} s")

    say(f"{what} …")
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def lively(bar: tqdm[Any]) -> Iterator[None]:
    """Redraws a progress bar every few seconds while a long step of it runs."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(HEARTBEAT_SECONDS):
            bar.refresh()

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def progress(what: str, total: int | None, unit: str = "row") -> Iterator[tqdm[Any]]:
    """A progress bar with rate and time left that shows it lives while a long step of it runs."""
    from tqdm import tqdm

    quiet = 0.5 if sys.stderr.isatty() else 5
    bar = tqdm(total=total, desc=what, unit=unit, mininterval=quiet, file=sys.stderr)
    with bar, lively(bar):
        yield bar


def stage_main(stage: str, run: Callable[[Params, Paths], object]) -> None:
    """Runs one stage of the workspace in the current folder and exits with its code.

    0 on success, 2 after a user's mistake (one sentence on stderr), 1 after a fault of ours
    (with its traceback). DVC turns every failure into its own code, so the status file keeps ours.
    """
    die_with_parent()
    paths = _workspace(stage)

    def status(state: str, code: int, message: str) -> None:
        StageStatus.model_validate(
            {"stage": stage, "state": state, "exit_code": code, "message": message, "pid": os.getpid()}
        ).write(paths.status(stage))

    status("running", 0, "")
    try:
        run(read_params(paths.params), paths)
    except UserError as error:
        status("failed", USER_ERROR_EXIT_CODE, str(error))
        say(f"{stage}: {error}")
        sys.exit(USER_ERROR_EXIT_CODE)
    except BaseException as error:
        with suppress(OSError):
            code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
            status("failed", code, f"{type(error).__name__}: {error}")
        raise
    status("succeeded", 0, "")


def _workspace(stage: str) -> Paths:
    try:
        return Paths.here()
    except UserError as error:
        say(f"{stage}: {error}")
        sys.exit(USER_ERROR_EXIT_CODE)
