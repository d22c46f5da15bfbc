"""What a flow needs before its first task: the workspace to itself, and stores that exist."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.errors import UserError
from tasks.locks import held_alone
from tasks.params import Params
from tasks.paths import Paths
from tasks.stage import heartbeat, say
from tasks.tracking_store import tracking_uri


@contextmanager
def flow_lock(paths: Paths) -> Iterator[None]:
    """One flow a workspace.

    Raises:
        UserError: another flow holds it.
    """
    with held_alone(
        paths.flow_lock,
        lambda holder: (
            f"process {holder} already runs the pipeline in {paths.root}, and a workspace has room for one; "
            "wait for it, or stop it"
        ),
    ):
        yield


def prepare_stores(params: Params, paths: Paths) -> None:
    """Makes DVC's folder usable and MLflow's SQLite store, once, before several processes would race to.

    Raises:
        UserError: DVC cannot be set up here.
    """
    if not (paths.root / ".dvc").is_dir():
        _init_dvc(paths)
    elif not _under_git(paths.root):
        _do_without_git(paths)
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
    without = shutil.which("git") is None or not (paths.root / ".git").exists()
    _must(paths, "init", "-q", *(["--no-scm"] if without else []))


def _under_git(folder: Path) -> bool:
    """Whether DVC finds a repository in `folder` or above it."""
    return any((place / ".git").exists() for place in (folder, *folder.parents))


def _do_without_git(paths: Paths) -> None:
    """The shipped DVC folder expects git; an unpacked source archive has none, and DVC must be told."""
    if _dvc(paths, "config", "core.no_scm").stdout.strip() == "true":
        return
    _must(paths, "config", "--local", "core.no_scm", "true")
    say(
        "there is no git repository here, so DVC is told to do without (core.no_scm=true in .dvc/config.local; "
        "delete that line after `git init`); a registered version will name no commit"
    )


def _must(paths: Paths, *arguments: str) -> None:
    done = _dvc(paths, *arguments)
    if done.returncode:
        raise UserError(
            f"DVC could not be set up in {paths.root} ({done.stderr.strip() or done.stdout.strip()}); "
            f"run `dvc {' '.join(arguments)}` there and look at what it says"
        )


def _dvc(paths: Paths, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dvc", *arguments]
    return subprocess.run(command, cwd=paths.root, capture_output=True, text=True, check=False)
