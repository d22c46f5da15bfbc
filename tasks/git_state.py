"""What git says of a workspace: the commit and the change on top of it."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

# Whatever the user's configuration says, a diff that `git apply` takes.
DIFF = (
    "diff",
    "--binary",
    "--no-color",
    "--no-ext-diff",
    "--no-textconv",
    "--src-prefix=a/",
    "--dst-prefix=b/",
)


@dataclass(frozen=True)
class GitState:
    """`commit` is None outside a repository; `diff` is against that commit, binary files included.

    The diff is kept as bytes: line ends and encodings are the files' own. `unknown` counts files that git
    neither holds nor ignores; they are in no commit and no diff.
    """

    commit: str | None
    diff: bytes
    unknown: int

    @property
    def described(self) -> str:
        if self.commit is None:
            return "outside a git repository"
        changes = " with uncommitted changes" if self.diff.strip() else ""
        missing = f"; {self.unknown} file(s) git does not know are kept nowhere" if self.unknown else ""
        return f"git {self.commit[:12]}" + changes + missing


def git(root: Path, *arguments: str) -> bytes | None:
    """Output of a git command in `root`, or None when git or the repository is missing."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def git_state(root: Path) -> GitState:
    commit = git(root, "rev-parse", "HEAD")
    if commit is None:
        return GitState(None, b"", 0)
    others = git(root, "ls-files", "--others", "--exclude-standard", "-z") or b""
    # dvc.lock is an artifact of its own, and a replay makes its own anew.
    diff = git(root, *DIFF, "HEAD", "--", ".", ":!dvc.lock") or b""
    return GitState(commit.decode().strip(), diff, others.count(b"\0") - (b"dvc.lock\0" in others))
