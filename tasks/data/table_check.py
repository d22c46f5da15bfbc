"""Whether table files can be read at all, asked in a process that may die of it.

A damaged Arrow file can end the process that reads it: the library then meets lengths that no string has, or offsets
into memory that is not its own. So files are first read where that harms nobody.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from tasks.data.files import Kind, is_local
from tasks.errors import UserError

TABLES = ("parquet", "arrow")
HEAD_ROWS = 1000
CUT_BYTES = 1 << 20
File = tuple[str, str, Kind]  # name, address, kind


def check_tables(files: Sequence[File], whole: bool) -> None:
    """Reads those of `files` that are tables of this machine: their heads and first rows, or all rows.

    What is wrong with a file that can be told without dying is left to be told where it is read again.

    Raises:
        UserError: naming the file that ended the process.
    """
    tables = [file for file in files if file[2] in TABLES and is_local(file[1])]
    if not tables:
        return
    root = str(Path(__file__).parents[2])
    path = os.environ.get("PYTHONPATH")
    done = subprocess.run(
        [sys.executable, "-m", "tasks.data.table_check"],
        input=json.dumps([whole, tables]),
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return
    begun = done.stdout.splitlines()
    if not begun:  # it did not come to read anything
        raise RuntimeError(f"the check of tables ended with {done.returncode}: {done.stderr[-2000:]}")
    name = json.loads(begun[-1])
    if done.returncode == -signal.SIGKILL:
        raise UserError(
            f"the process that read {name} was killed, most often since memory ran out; free some and start again"
        )
    raise UserError(f"{name} is damaged: reading it ends the process that does; fetch or write it again")


def _read(address: str, kind: Kind, whole: bool) -> None:
    from tasks.data.arrow_rows import arrow_cuts, parquet_cuts, read_arrow, read_parquet

    cuts, read = (parquet_cuts, read_parquet) if kind == "parquet" else (arrow_cuts, read_arrow)
    cuts(address, CUT_BYTES)
    for _ in islice(read(address, 0, None, 1, None), None if whole else HEAD_ROWS):
        pass


def main() -> None:
    """Names each file on stdout before it is read."""
    whole, files = json.load(sys.stdin)
    for name, address, kind in files:
        print(json.dumps(name), flush=True)
        with suppress(Exception):
            _read(address, kind, whole)


if __name__ == "__main__":
    main()
