"""Runs one DVC stage in a process group of its own, and kills the whole group when the flow is cancelled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tasks.contracts import StageStatus
from tasks.errors import PREEMPTED_EXIT_CODE, USER_ERROR_EXIT_CODE
from tasks.paths import Paths
from tasks.stage import die_with_parent, say


class StageFailed(RuntimeError):
    """A stage ended with `code`; 2 is a user's mistake and is never retried."""

    def __init__(self, stage: str, code: int, message: str) -> None:
        super().__init__(
            f"{stage} ended with code {code}: {message}" if message else f"{stage} ended with code {code}"
        )
        self.stage, self.code, self.message = stage, code, message

    @property
    def users_mistake(self) -> bool:
        return self.code == USER_ERROR_EXIT_CODE

    @property
    def retry(self) -> bool:
        """Neither a mistake nor a wish to stop gets better by trying again."""
        return self.code not in (USER_ERROR_EXIT_CODE, PREEMPTED_EXIT_CODE)

    def __reduce__(self) -> tuple[type, tuple[str, int, str]]:
        return type(self), (self.stage, self.code, self.message)


def stage_environment() -> dict[str, str]:
    """The environment of stages: this interpreter's programs come first, so `python` is this one."""
    binaries = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", "")
    return {**os.environ, "PATH": f"{binaries}{os.pathsep}{path}", "PYTHONUNBUFFERED": "1"}


def run_stage(root: Path, stage: str, force: bool = False) -> bool:
    """Runs `dvc repro -s <stage>` in `root`; returns whether the stage itself ran.

    Its output goes to the terminal. Any end of this function but a return leaves no process behind.

    Raises:
        StageFailed: with the stage's own exit code, which DVC hides.
    """
    paths = Paths(root)
    status = paths.status(stage)
    status.unlink(missing_ok=True)
    command = [sys.executable, "-m", "dvc", "repro", "--quiet", "--single-item"]
    command += [*(["--force"] if force else []), stage]
    say(f"── {stage}")
    began = time.monotonic()
    child = subprocess.Popen(
        command,
        cwd=root,
        env=stage_environment(),
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        start_new_session=True,
        preexec_fn=die_with_parent,  # noqa: PLW1509
    )
    try:
        code = child.wait()
    finally:
        kill_group(child)
    if code == 0:
        ran = status.is_file()
        say(f"── {stage}: {'done' if ran else 'up to date'} in {time.monotonic() - began:.0f} s")
        return ran
    ended = StageStatus.read(status) if status.is_file() else None
    if ended is not None and ended.state == "failed":
        raise StageFailed(stage, ended.exit_code, ended.message)
    raise StageFailed(stage, code, "see its output above")


def kill_group(child: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the child's process group and to whatever it started in groups of their own."""
    family: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(child.pid).children(recursive=True)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    child.wait()
    psutil.wait_procs(family, timeout=5)
