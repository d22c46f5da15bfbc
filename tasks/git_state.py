"""What git says of a workspace: the commit and the change on top of it."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class GitState:
    """`commit` is None outside a repository; `diff` is against that commit, binary files included."""

    commit: str | None
    diff: str

    @property
    def described(self) -> str:
        if self.commit is None:
            return "no git repository"
        return self.commit[:12] + (" with uncommitted changes" if self.diff.strip() else "")


def git(root: Path, *arguments: str) -> str | None:
    """Output of a git command in `root`, or None when git or the repository is missing."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def git_state(root: Path) -> GitState:
    commit = git(root, "rev-parse", "HEAD")
    if commit is None:
        return GitState(None, "")
    return GitState(commit.strip(), git(root, "diff", "--binary", "HEAD", "--", ".", ":!dvc.lock") or "")
