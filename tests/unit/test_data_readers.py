"""Files of every kind -> their rows: nothing lost, each named, whole or in pieces alike."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import pickle
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import feather

from tasks.data.rows import BadRow
from tasks.data.shards import RawRow, first_rows, read_shard, shards_of
from tasks.errors import UserError
from tests.unit.reading import contents, raw_rows, source, wheres, write_lines

ROWS = [{"instruction": f"q{number} é\u2028", "output": "a\nb"} for number in range(50)]
BOM = b"\xef\xbb\xbf"
lines = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in ROWS)
listed = json.dumps(ROWS, ensure_ascii=False).encode()


def zstd(content: bytes) -> bytes:
    return bytes(pa.compress(content, "zstd", asbytes=True))


def csv_text(separator: str = ",") -> bytes:
    cells = [[row["instruction"], row["output"]] for row in ROWS]
    table = [separator.join(f'"{cell}"' for cell in pair) for pair in [["instruction", "output"], *cells]]
    return "\r\n".join(table).encode()


def write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return path.name


# --- every kind ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("r.json", listed),
        ("r.json", BOM + json.dumps(ROWS, indent=2).encode().replace(b"\n", b"\r\n")),
        ("r.json", lines),  # many hubs call JSON lines so
        ("r.json", b"\n".join(json.dumps(row, indent=1).encode() for row in ROWS)),  # rows over several lines
        ("r.jsonl", lines),
        ("r.jsonl", BOM + lines.replace(b"\n", b"\r\n\r\n")),
        ("r.jsonl", lines.rstrip(b"\n")),
        ("r.jsonl", listed),  # one list on one line
        ("r.ndjson", lines),
        ("r.csv", csv_text()),
        ("r.csv", BOM + csv_text(";")),
        ("r.tsv", csv_text("\t")),
        ("r.jsonl.gz", gzip.compress(lines)),
        ("r.jsonl.gz", gzip.compress(lines[:999]) + gzip.compress(lines[999:])),  # several members
        ("r.jsonl.gz", lines),  # a client that unpacked on the way
        ("r.json.zst", zstd(listed)),
        ("r.jsonl.zst", zstd(lines[:999]) + zstd(lines[999:])),
        ("r.csv.bz2", bz2.compress(csv_text())),
        ("r.jsonl.xz", lzma.compress(lines)),
    ],
)
@pytest.mark.parametrize("target", [100, 1 << 30])
def test_text_files_give_their_rows(tmp_path: Path, name: str, content: bytes, target: int) -> None:
    found = raw_rows(tmp_path, write(tmp_path / name, content), target)
    assert contents(found) == ROWS
    assert len(set(wheres(found))) == len(ROWS)


@pytest.mark.parametrize(
    ("name", "write_table"),
    [
        ("r.parquet", lambda table, path: pq.write_table(table, path, row_group_size=7)),
        ("r.feather", lambda table, path: feather.write_feather(table, path, chunksize=7)),
        ("r.arrow", lambda table, path: _ipc(pa.ipc.new_file, table, path)),
        ("r.arrow", lambda table, path: _ipc(pa.ipc.new_stream, table, path)),
    ],
)
@pytest.mark.parametrize("target", [100, 1 << 30])
def test_tables_give_their_rows(
    tmp_path: Path, name: str, write_table: Callable[[pa.Table, str], None], target: int
) -> None:
    write_table(pa.Table.from_pylist(ROWS), str(tmp_path / name))
    found = raw_rows(tmp_path, name, target)
    assert contents(found) == ROWS
    assert wheres(found) == [f"{name}: row {number}" for number in range(1, 51)]


def _ipc(kind: Any, table: pa.Table, path: str) -> None:
    with pa.OSFile(path, "wb") as sink, kind(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def test_a_text_file_holds_a_row_a_line(tmp_path: Path) -> None:
    write(tmp_path / "r.txt", BOM + "first é\r\n\r\n  second\n".encode())
    assert contents(raw_rows(tmp_path, "r.txt")) == [{"text": "first é"}, {"text": "second"}]


# --- in pieces ----------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(json_values.filter(lambda value: value is not None), min_size=1, max_size=12),
    st.integers(1, 60),
    st.booleans(),
    st.sampled_from([None, 1]),
)
def test_a_list_and_lines_read_the_same_wherever_they_are_cut(
    tmp_path: Path, rows: list[Any], target: int, ascii_only: bool, indent: int | None
) -> None:
    """repr, since NaN is not equal to itself."""
    (tmp_path / "r.json").write_text(
        json.dumps(rows, ensure_ascii=ascii_only, indent=indent), "utf-8", "surrogatepass"
    )
    text = "".join(json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows)
    (tmp_path / "r.jsonl").write_text(text, "utf-8", "surrogatepass", newline="")
    from_list, from_lines = (raw_rows(tmp_path, name, target) for name in ("r.json", "r.jsonl"))
    if not text.startswith("["):  # then the file may be taken for a list
        assert list(map(repr, contents(from_lines))) == list(map(repr, contents(from_list)))
        assert wheres(from_lines) == [f"r.jsonl: line {number}" for number in range(1, len(rows) + 1)]
    assert len(from_list) == len(rows)
    assert wheres(from_list) == [f"r.json: row {number}" for number in range(1, len(rows) + 1)]


@pytest.mark.parametrize("name", ["r.jsonl", "r.json", "r.parquet", "r.arrow"])
def test_pieces_are_even_the_same_every_time_and_go_to_other_processes(tmp_path: Path, name: str) -> None:
    rows = [{"text": f"{number} " + "x" * 90} for number in range(2000)]
    if name == "r.json":
        (tmp_path / name).write_text(json.dumps(rows, indent=1))
    elif name == "r.jsonl":
        write_lines(tmp_path / name, rows)
    elif name == "r.parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name, row_group_size=50, compression="none")
    else:
        with (
            pa.OSFile(str(tmp_path / name), "wb") as sink,
            pa.ipc.new_stream(sink, pa.schema([("text", pa.string())])) as out,
        ):
            out.write_table(pa.Table.from_pylist(rows), max_chunksize=50)
    target = 20_000
    shards = shards_of([source(tmp_path, name)], target)
    assert shards == shards_of([source(tmp_path, name)], target)
    assert 8 <= len(shards) <= 15
    assert all(target / 2 < shard.size < 2 * target for shard in shards[:-1])
    sent = [pickle.loads(pickle.dumps(shard)) for shard in shards]
    assert (
        contents(row for shard in reversed(sent) for row in reversed(list(read_shard(shard)))) == rows[::-1]
    )


def test_a_long_list_is_read_in_little_memory(tmp_path: Path) -> None:
    row = json.dumps({"text": "y" * 1000})
    with (tmp_path / "r.json").open("w") as file:
        file.write("[" + row)
        for _ in range(20_000):
            file.write(",\n" + row)
        file.write("]")
    (shard,) = shards_of([source(tmp_path, "r.json")], 1 << 40)
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_shard(shard)) == 20_001
        assert tracemalloc.get_traced_memory()[1] < 8 << 20  # of a file of 20 MB
    finally:
        tracemalloc.stop()


# --- what is wrong is said, with its place ------------------------------------------------------


@pytest.mark.parametrize("target", [5, 1 << 30])
def test_a_line_that_is_no_json_is_one_bad_row(tmp_path: Path, target: int) -> None:
    text = b'{"a": 1}\n{broken\n\n\x00\x00\n{"a": 2} {"a": 3}\n' + b"[" * 100_000 + b'\n{"a": 4}'
    found = raw_rows(tmp_path, write(tmp_path / "r.jsonl", text), target)
    assert wheres(found) == [f"r.jsonl: line {number}" for number in (1, 2, 4, 5, 6, 7)]
    assert [row.content for row in found if isinstance(row, RawRow)] == [{"a": 1}, {"a": 4}]
    bad = [row[1] for row in found if isinstance(row, tuple)]
    assert [row.reason for row in bad] == ["a line that is no JSON"] * 3 + [
        "a line that is nested too deeply"
    ]
    assert "Expecting property name" in bad[0].found and "at column 2, near '{broken'" in bad[0].found
    assert all(row.fix for row in bad)


def test_a_row_that_is_broken_first_does_not_change_how_the_others_are_read(tmp_path: Path) -> None:
    for name in ("r.jsonl", "r.json"):
        found = raw_rows(tmp_path, write(tmp_path / name, b'{"a": 1\n{"a": 2}\n{"a": 3}\n'))
        assert contents(found)[1:] == [{"a": 2}, {"a": 3}]
        assert wheres(found)[0] == f"{name}: line 1" and isinstance(found[0], tuple)


def test_numbers_keys_and_bytes_that_json_readers_differ_on(tmp_path: Path) -> None:
    """A list and lines agree: NaN is read, the last of equal keys counts, integers may be long, bytes be odd."""
    row = (
        b'{"n": NaN, "i": -Infinity, "k": 1, "k": 2, "b": 12345678901234567890123, "l": '
        + b"7" * 5000
        + b', "u": "\xff"}'
    )
    for name, text in (("r.jsonl", row), ("r.json", b"[" + row + b"]")):
        ((content,),) = [contents(raw_rows(tmp_path, write(tmp_path / name, text)))]
        assert content["n"] != content["n"] and content["i"] == float("-inf") and content["k"] == 2
        assert content["b"] == 12345678901234567890123 and str(content["l"]) == "7" * 5000
        assert content["u"] == "\udcff"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", b"", "is empty"),
        ("a.jsonl", BOM + b" \n", "is empty"),
        ("a.json", b"[]", "holds no rows"),
        ("a.json", b'{"instruction": "q"}', "holds one object, not a list of rows; put the rows in"),
        ("a.json", b'{\n "data": [\n  {"a": 1}\n ]\n}\n', "holds one object, not a list"),
        ("a.json", b'[{"a": 1},\n{"a": 2}\n{"a": 3}]', "line 3 .no comma between two rows"),
        ("a.json", b'[{"a": 1},\n{"a": 2},]', "line 2 .a comma with no row"),
        ("a.json", b'[{"a": 1},\n{"a": }]', "line 2 .Expecting value"),
        ("a.json", b'[{"a": 1},\n{"a": "', "line 2 .Unterminated string"),
        ("a.json", b'[{"a": 1},\n{"a": 2}', "breaks off after row 2: the list never ends"),
        ("a.json", b'[{"a": 1}]\n[{"a": 2}]', "line 2 .text behind the end of the list"),
        ("a.json", b"[" * 100_000, "nested too deeply"),
        ("a.json", b"hello", "not valid JSON at line 1"),
        ("a.json", '[{"a": 1}]'.encode("utf-16"), "is UTF-16; save it as UTF-8"),
        (
            "a.jsonl",
            b"version https://git-lfs.github.com/spec/v1\n",
            "Git LFS pointer, not the data; run git lfs pull",
        ),
        ("a.csv", b"<!DOCTYPE html><html>", "is a web page"),
        ("a.json", b"PAR1....", "is a Parquet file; name it as one"),
        ("a.jsonl.gz", gzip.compress(lines)[:-20], r"a\.jsonl\.gz cannot be read .Truncated"),
        ("a.jsonl.zst", zstd(lines)[:-20], r"a\.jsonl\.zst cannot be read .Truncated"),
        ("a.jsonl.xz", lzma.compress(lines)[:-20], r"a\.jsonl\.xz cannot be read .Compressed file ended"),
        ("a.parquet", b"PAR1 not really PAR1", r"a\.parquet cannot be read"),
        ("a.arrow", b"nothing of this kind", r"a\.arrow cannot be read"),
        ("a.parquet.gz", gzip.compress(b"PAR1"), "is packed as a whole"),
        ("a.xlsx", b"PK", r"ends in \.xlsx; give a file that ends in \.json, \.jsonl"),
        ("a.csv", b"x,x\n1,2\n", "has two columns called x in its first line"),
        ("a.feather", b"FEA1....", "Feather of version 1; write it again"),
        ("a.csv", b'x,y\n1,2\n3,"4\n5,6\n', "a quote opens in the row at line 3 and never closes"),
    ],
)
def test_files_that_cannot_be_read_name_themselves(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    write(tmp_path / name, content)
    with pytest.raises(UserError, match=words) as error:
        first_rows(source(tmp_path, name))
        raw_rows(tmp_path, name)
    assert name in str(error.value) and str(tmp_path) not in str(error.value)


def test_csv_cells_may_hold_anything_and_odd_rows_are_bad(tmp_path: Path) -> None:
    text = b'\n, output\n"a, b","c\r\nd ""e"""\n1,2,3\n"x"y,z\n\n,\nlast,\xe9\n'
    found = raw_rows(tmp_path, write(tmp_path / "r.csv", text))
    assert [row.content for row in found if isinstance(row, RawRow)] == [
        {"column 1": "a, b", "output": 'c\r\nd "e"'},
        {"column 1": "", "output": ""},
        {"column 1": "last", "output": "\udce9"},
    ]
    bad = [row for row in found if isinstance(row, tuple)]
    assert [(where, error.reason) for where, error in bad] == [
        ("r.csv: line 5", "another number of cells than the header has"),
        ("r.csv: line 6", "a row that is no CSV"),
    ]
    assert "3 cells (allowed: 2: column 1, output)" in str(bad[0][1])


def test_a_cell_that_python_cannot_hold_spoils_its_row_alone(tmp_path: Path) -> None:
    texts = pa.StringArray.from_buffers(
        3, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xffc")
    )
    pq.write_table(pa.table({"text": texts}), tmp_path / "r.parquet")
    one, bad, three = raw_rows(tmp_path, "r.parquet")
    assert isinstance(one, RawRow) and isinstance(three, RawRow)
    assert (one.content, three.content) == ({"text": "a"}, {"text": "c"})
    assert isinstance(bad, tuple) and bad[0] == "r.parquet: row 2"
    assert bad[1].reason == "a cell that is not UTF-8" and "column text" in bad[1].found


def test_only_columns_that_may_be_used_are_decoded(tmp_path: Path) -> None:
    """An odd type elsewhere in the table does no harm, and a row without any known column is still a row."""
    far = pa.array([2**62, 1], pa.timestamp("ms"))
    table = pa.table({"text": ["a", "b"], "when": far, "Frage": ["c", "d"]})
    pq.write_table(table, tmp_path / "r.parquet")
    assert contents(raw_rows(tmp_path, "r.parquet")) == [{"text": "a"}, {"text": "b"}]
    mapped = raw_rows(tmp_path, "r.parquet", columns={"instruction": "Frage"})
    assert contents(mapped) == [{"text": "a", "Frage": "c"}, {"text": "b", "Frage": "d"}]
    pq.write_table(table.select(["when"]), tmp_path / "w.parquet")
    assert len(raw_rows(tmp_path, "w.parquet")) == 2


def test_bad_rows_cross_processes_whole() -> None:
    bad = BadRow("unknown role", "use another", "'x'", "a, b")
    again = pickle.loads(pickle.dumps(bad))
    assert (str(again), again.fix) == ("unknown role: 'x' (allowed: a, b)", "use another")
    assert again.line("f: row 1")["found"] == "'x'" and re.match("unknown", again.reason)
