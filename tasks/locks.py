"""Locks on files that the kernel lets go of when their holder dies, however it dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tasks.errors import UserError


@contextmanager
def held_alone(file: Path, refusal: Callable[[str], str]) -> Iterator[None]:
    """Holds `file` for this process, whose number it then contains.

    Args:
        refusal: makes the sentence of the error from the holder's process number ("?" if it is unknown).

    Raises:
        UserError: another process holds it.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+") as opened:
        if not taken_alone(opened):
            opened.seek(0)
            raise UserError(refusal(opened.read().strip() or "?"))
        opened.truncate(0)
        opened.write(str(os.getpid()))
        opened.flush()
        yield


def taken_alone(opened: IO[str]) -> bool:
    """Takes the lock on an open file, unless another process holds or shares it; held until it is closed."""
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def share(file: Path) -> IO[str]:
    """Shares `file` with others as long as the returned one is open; waits while one process holds it alone."""
    opened = file.open("a+")
    fcntl.flock(opened, fcntl.LOCK_SH)
    return opened
