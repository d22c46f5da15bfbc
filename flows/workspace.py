"""What a flow needs before its first task: the workspace to itself, and stores that exist."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tasks.errors import UserError
from tasks.params import Params
from tasks.paths import Paths
from tasks.stage import heartbeat
from tasks.tracking_store import tracking_uri


@contextmanager
def flow_lock(paths: Paths) -> Iterator[None]:
    """One flow a workspace.

    Raises:
        UserError: another flow holds it.
    """
    paths.flow_lock.parent.mkdir(parents=True, exist_ok=True)
    with paths.flow_lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"process {file.read().strip() or '?'} already runs the pipeline in {paths.root}, and a workspace "
                "has room for one; wait for it, or stop it"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def prepare_stores(params: Params, paths: Paths) -> None:
    """Makes DVC's folder and MLflow's SQLite store once, before several processes would race to.

    Raises:
        UserError: neither git nor a DVC folder is here, and DVC cannot make one.
    """
    if not (paths.root / ".dvc").is_dir():
        _init_dvc(paths)
    uri = tracking_uri(params.register_, paths)
    if uri == f"sqlite:///{paths.mlflow_db}" and not paths.mlflow_db.is_file():
        with heartbeat("making MLflow's store (once)"):
            code = (
                "from tasks.params import read_params; from tasks.paths import Paths; "
                "from tasks.tracking_store import connect; "
                "paths = Paths.here(); connect(read_params(paths.params).register_, paths)"
            )
            # A process of its own: MLflow's libraries would slow this one's start for nothing.
            subprocess.run([sys.executable, "-c", code], cwd=paths.root, check=True)


def _init_dvc(paths: Paths) -> None:
    command = [sys.executable, "-m", "dvc", "init", "-q"]
    if shutil.which("git") is None or not (paths.root / ".git").exists():
        command.append("--no-scm")
    done = subprocess.run(command, cwd=paths.root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(
            f"DVC could not be set up in {paths.root} ({done.stderr.strip() or done.stdout.strip()}); "
            "run `dvc init` there and look at what it says"
        )
