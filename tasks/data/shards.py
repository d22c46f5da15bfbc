"""Sources cut into pieces that can be read on their own, and what reads them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from tasks.data.columns import read_columns
from tasks.data.files import Kind, SourceFile, faults_named, open_unpacked
from tasks.data.json_values import JsonValues
from tasks.data.rows import BadRow
from tasks.data.sources import Source
from tasks.errors import UserError

# So many of a source's first rows are looked at to tell its format.
FIRST_ROWS, FIRST_BYTES = 200, 64 << 20


@dataclass(slots=True)
class RawRow:
    """A row as it stood in its source; `where` names file and row for the user."""

    content: Any
    where: str


@dataclass(frozen=True)
class Shard:
    """A piece of a source's file: plain data, the same wherever it is cut for the same files and target.

    Args:
        source: the source, without its files.
        start, stop: bytes of lines and lists, row groups of Parquet, record batches of Arrow; stop None: to the end.
        first: the number of its first line or row.
        size: its bytes, for progress.
        columns: of a table, those to read; None: all.
    """

    source: Source
    name: str
    address: str
    kind: Kind
    packed: str = ""
    start: int = 0
    stop: int | None = None
    first: int = 1
    size: int = 0
    columns: tuple[str, ...] | None = None

    @property
    def folder(self) -> str:
        """Where relative paths of its rows' pictures start."""
        return self.address.rpartition("/")[0]


def shards_of(sources: Sequence[Source], target_bytes: int) -> list[Shard]:
    """All pieces of all sources, in order. Each has about `target_bytes` where its kind can be cut: JSON lines, JSON
    lists, text, Parquet and Arrow that lie on this machine unpacked; else it is a whole file.

    Raises:
        UserError: a file cannot be read, or a JSON list is none.
    """
    return [
        shard
        for source in sources
        for file in source.files
        for shard in _shards_of_file(source, file, target_bytes)
    ]


def _shards_of_file(source: Source, file: SourceFile, target: int) -> Iterator[Shard]:
    columns = tuple(sorted(read_columns(source.columns)))
    head = replace(source, files=(), ignored=())

    def shard(start: int = 0, stop: int | None = None, first: int = 1, size: int = file.size) -> Shard:
        return Shard(head, file.name, file.address, file.kind, file.packed, start, stop, first, size, columns)

    if not file.local or file.packed or file.kind in ("csv", "tsv", "values", "docstrings"):
        yield shard()
        return
    with faults_named(file.name):
        if file.kind in ("parquet", "arrow"):
            from tasks.data.arrow_rows import arrow_cuts, parquet_cuts

            cuts = parquet_cuts if file.kind == "parquet" else arrow_cuts
            for start, stop, first, size in cuts(file.address, target):
                yield shard(start, stop, first, size)
        elif file.size <= target:
            yield shard()
        elif file.kind == "list":
            yield from _list_shards(file, target, shard)
        else:
            from tasks.data.text_rows import line_cuts

            for start, stop, first in line_cuts(file.address, file.size, target):
                yield shard(start, stop, first, stop - start)


def _list_shards(file: SourceFile, target: int, shard: Any) -> Iterator[Shard]:
    """Decodes the whole list to find where rows begin: a tenth of the time that tokenizing them takes."""
    with open(file.address, "rb", buffering=0) as raw:
        values = JsonValues(raw, file.name)
        start, first = 0, 1
        for _ in values:
            if not values.reached(start + target):
                continue
            here = values.offset
            yield shard(start, here, first, here - start)
            start, first = here, values.row + 1
        if first <= values.row:
            yield shard(start, None, first, file.size - start)


def read_shard(shard: Shard) -> Iterator[RawRow | tuple[str, BadRow]]:
    """The rows of a shard as they stand there, in order; for what is no row (file and line, what is wrong).

    Raises:
        UserError: the file is gone, cut off, or not what its name says.
    """
    if shard.kind == "docstrings":
        from tasks.data.docstrings import docstring_rows

        yield from (RawRow({"messages": row.chat, "group": row.group}, row.where) for row in docstring_rows())
        return
    unit = "line" if shard.kind in ("lines", "text", "csv", "tsv") else "row"
    with faults_named(shard.name):
        for number, content in _numbered(shard):
            where = f"{shard.name}: {unit} {number}"
            yield (where, content) if isinstance(content, BadRow) else RawRow(content, where)


def _numbered(shard: Shard) -> Iterator[tuple[int, Any]]:
    if shard.kind in ("parquet", "arrow"):
        from tasks.data.arrow_rows import read_arrow, read_parquet

        read = read_parquet if shard.kind == "parquet" else read_arrow
        yield from read(shard.address, shard.start, shard.stop, shard.first, shard.columns)
    else:
        with open_unpacked(shard.address, shard.packed) as stream:
            if shard.start:
                stream.seek(shard.start)
            yield from _of_text(shard, stream)


def _of_text(shard: Shard, stream: BinaryIO) -> Iterator[tuple[int, Any]]:
    from tasks.data.text_rows import read_csv, read_lines

    size = None if shard.stop is None else shard.stop - shard.start
    if shard.kind in ("lines", "text"):
        yield from read_lines(stream, size, shard.first, as_json=shard.kind == "lines")
    elif shard.kind in ("csv", "tsv"):
        yield from read_csv(stream, shard.name, tabs=shard.kind == "tsv")
    else:
        inside, listed = shard.start > 0, shard.kind == "list"
        values = JsonValues(stream, shard.name, inside=inside, stop=size, listed=listed)
        yield from enumerate(values, shard.first)


def _size(content: Any) -> int:
    """Characters and bytes of a row, pictures included."""
    size, left = 0, [content]
    while left:
        value = left.pop()
        if isinstance(value, str | bytes):
            size += len(value)
        elif isinstance(value, Mapping):
            left += value.values()
        elif isinstance(value, list | tuple):
            left += value
    return size


def first_rows(source: Source, count: int = FIRST_ROWS) -> list[RawRow | tuple[str, BadRow]]:
    """The first rows of a source with all their columns, for `detect`; fewer where they are large.

    Raises:
        UserError: it holds none.
    """
    rows = itertools.chain.from_iterable(
        read_shard(Shard(source, file.name, file.address, file.kind, file.packed)) for file in source.files
    )
    found: list[RawRow | tuple[str, BadRow]] = []
    held = 0
    for row in itertools.islice(rows, count):
        found.append(row)
        held += _size(row.content) if isinstance(row, RawRow) else 0
        if held > FIRST_BYTES:
            break
    if not found:
        raise UserError(
            f"prepare_data.source={source.name} holds no rows; give a file with at least two rows"
        )
    return found
