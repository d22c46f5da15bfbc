"""What is told of the code that made a model."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tasks.git_state import git_state

LATIN, WINDOWS = "na\xefve\n".encode("latin-1"), b"one\r\ntwo\r\n"


def git(root: Path, *arguments: str, fed: bytes | None = None) -> bytes:
    identity = ("-c", "user.name=t", "-c", "user.email=t@t")
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=root, input=fed, capture_output=True, check=True
    )
    return done.stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "-q")
    (root / "text").write_bytes(b"old\n")
    (root / "windows").write_bytes(b"one\r\n")
    (root / ".gitignore").write_text("ignored\n")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "start")
    return root


def test_outside_a_repository(tmp_path: Path) -> None:
    state = git_state(tmp_path)
    assert (state.commit, state.diff) == (None, b"")
    assert state.described == "outside a git repository"


def test_a_clean_tree_is_its_commit(repository: Path) -> None:
    (repository / "ignored").touch()
    (repository / "dvc.lock").touch()
    state = git_state(repository)
    assert state.described == "git " + git(repository, "rev-parse", "HEAD").decode()[:12]


def test_a_change_can_be_put_on_its_commit_again(repository: Path, tmp_path: Path) -> None:
    """Bytes that are no UTF-8 and Windows' line ends included, whatever the user told git about diffs."""
    git(repository, "config", "diff.noprefix", "true")
    git(repository, "config", "color.diff", "always")
    (repository / "text").write_bytes(LATIN)
    (repository / "windows").write_bytes(WINDOWS)
    (repository / "new.py").touch()
    state = git_state(repository)
    assert state.described.endswith("with uncommitted changes; 1 file(s) git does not know are kept nowhere")
    git(repository, "worktree", "add", "-q", str(tmp_path / "copy"), str(state.commit))
    git(tmp_path / "copy", "apply", "-", fed=state.diff)
    assert (tmp_path / "copy" / "text").read_bytes() == LATIN
    assert (tmp_path / "copy" / "windows").read_bytes() == WINDOWS
