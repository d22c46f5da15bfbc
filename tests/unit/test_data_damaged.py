"""Files that are cut off, or of which bits have changed: a sentence that names the file, in a process that lives on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.data.crew import Crew, WorkerLost
from tasks.data.parts import Parts, _named
from tasks.data.shards import Shard
from tasks.data.table_check import check_tables
from tasks.errors import UserError
from tasks.paths import Paths
from tasks.prepare_data import prepare_data
from tests import tiny
from tests.unit.reading import raw_rows, source
from tests.unit.test_data_any_row import EXAMPLES

TURNS = [{"role": "user", "content": "q" * 9}, {"role": "assistant", "content": "a", "calls": [{"n": 1}]}]


def write_table(path: Path, rows: int = 40) -> Path:
    table = pa.Table.from_pylist([{"messages": TURNS, "name": f"row {n}"} for n in range(rows)])
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=15)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as out:
            out.write_table(table, max_chunksize=15)
    return path


@pytest.fixture(scope="module")
def deadly(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """An Arrow file that ends whoever reads it: the first such with one byte of its footer changed."""
    folder = tmp_path_factory.mktemp("deadly")
    whole = write_table(folder / "whole.arrow").read_bytes()
    files: list[Any] = []
    for at in range(len(whole) - 1400, len(whole) - 10):
        file = folder / f"{at}.arrow"
        file.write_bytes(whole[:at] + b"\x7f" + whole[at + 1 :])
        files.append((file.name, str(file), "arrow"))
    try:
        check_tables(files, whole=True)
    except UserError as error:
        return (folder / str(error).split()[0]).read_bytes()
    pytest.skip("this pyarrow survives all of them")


def test_a_file_that_kills_its_reader_is_named_and_kills_nobody_here(tmp_path: Path, deadly: bytes) -> None:
    file = write_table(tmp_path / "data" / "raw" / "r.arrow")
    keys = {"model.name_or_path": "no-model", "prepare_data.source": "data/raw/r.arrow"}
    check_tables([("r.arrow", str(file), "arrow")], whole=True)
    file.write_bytes(deadly)
    with pytest.raises(
        UserError, match=r"^data/raw/r\.arrow is damaged: reading it ends the process that does; "
    ):
        prepare_data(tiny.params(**keys), Paths(tmp_path))


def test_a_worker_that_dies_of_a_file_names_it(tmp_path: Path, deadly: bytes) -> None:
    """As in large sources, of which the heads alone are read before."""
    good, bad = write_table(tmp_path / "good.arrow"), tmp_path / "bad.arrow"
    bad.write_bytes(deadly)
    head = source(tmp_path, "good.arrow")

    def lost(files: list[Path]) -> Iterator[Any]:
        parts = Parts(None)
        for file in files:
            parts.jobs.append(type("Job", (), {"shard": Shard(head, file.name, str(file), "arrow")})())

        def die() -> Iterator[Any]:
            raise WorkerLost("a process was killed")
            yield

        return _named(parts, die())

    with pytest.raises(UserError, match=r"^bad\.arrow is damaged"):
        list(lost([good, bad]))
    with pytest.raises(WorkerLost, match="a process was killed"):
        list(lost([good]))


def end_process(_: int) -> None:
    import os

    os.abort()


def test_a_process_that_aborts_is_a_lost_worker() -> None:
    with Crew(1) as crew, pytest.raises(WorkerLost):
        list(crew.ordered(end_process, [1]))


def changed(whole: bytes, draw: random.Random) -> bytes:
    """With some bits, bytes or stretches changed, more often near the end, where footers are."""
    found = bytearray(whole)
    for _ in range(draw.choice([1, 1, 2, 8])):
        at = draw.choice([draw.randrange(len(found)), len(found) - 1 - draw.randrange(min(len(found), 1500))])
        match draw.randrange(4):
            case 0:
                found[at] ^= 1 << draw.randrange(8)
            case 1:
                found[at] = draw.choice([0, 127, 128, 255])
            case 2:
                del found[at : at + draw.randint(1, 20)]
            case _:
                del found[at:]
        if len(found) < 16:
            break
    return bytes(found)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_damaged_table_is_read_or_named(tmp_path: Path, suffix: str) -> None:
    """What passes the check can be read here, or is refused by name."""
    whole = write_table(tmp_path / f"whole{suffix}").read_bytes()
    draw = random.Random(11)
    died = 0
    files = []
    for number in range(EXAMPLES // 5):
        file = tmp_path / f"r{number}{suffix}"
        file.write_bytes(changed(whole, draw))
        files.append((file.name, str(file), suffix.removeprefix(".")))
    while files:
        try:
            check_tables(files, whole=True)
            break
        except UserError as error:
            died += 1
            at = next(
                place for place, file in enumerate(files) if str(error).startswith(f"{file[0]} is damaged")
            )
            _each_read_or_named(tmp_path, files[:at])
            files = files[at + 1 :]
    _each_read_or_named(tmp_path, files)
    assert died < EXAMPLES // 10


def _each_read_or_named(root: Path, files: list[Any]) -> None:
    for name, _, _ in files:
        try:
            rows = raw_rows(root, name)
        except UserError as error:
            assert name in str(error)
        else:
            assert rows
