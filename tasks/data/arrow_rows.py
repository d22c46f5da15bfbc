"""Rows of Parquet and Arrow files, without the nulls that a table puts where a row had nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.data.files import file_system, is_local
from tasks.data.rows import BadRow, quoted

# Rows that are Python objects at the same time, and bytes of them: rows may hold pictures.
AT_ONCE, BYTES_AT_ONCE = 1000, 32 << 20

Mend = Callable[[Any], Any]
# (start, stop, number of the first row, bytes) of row groups or batches.
Cut = tuple[int, int, int, int]


def parquet_cuts(address: str, target: int) -> list[Cut]:
    """Row groups joined to pieces of about `target` bytes in memory."""
    with _opened(address) as opened:
        footer = pq.ParquetFile(opened).metadata
        groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
        return _cuts([(group.num_rows, group.total_byte_size) for group in groups], target)


def arrow_cuts(address: str, target: int) -> list[Cut]:
    """Record batches joined to pieces of about `target` bytes in memory; only their heads are read."""
    with _opened(address, mapped=True) as opened:
        return _cuts([(batch.num_rows, batch.nbytes) for batch in _batches(opened, 0, None)], target)


def _cuts(sizes: Sequence[tuple[int, int]], target: int) -> list[Cut]:
    cuts: list[Cut] = []
    start, first, rows, held = 0, 1, 0, 0
    for number, (count, size) in enumerate(sizes, 1):
        rows, held = rows + count, held + size
        if held >= target or number == len(sizes):
            cuts.append((start, number, first, held))
            start, first, rows, held = number, first + rows, 0, 0
    return cuts


def read_parquet(
    address: str, start: int, stop: int | None, first: int, columns: Collection[str] | None
) -> Iterator[tuple[int, Any]]:
    """(row's number, row) of row groups `start` to `stop`; of the columns only those named in `columns`, if it is."""
    with _opened(address) as opened:
        file = pq.ParquetFile(opened)
        names = _wanted(file.schema_arrow, columns)
        groups = list(range(start, file.metadata.num_row_groups if stop is None else stop))
        footer = [file.metadata.row_group(number) for number in groups]
        size, rows = sum(group.total_byte_size for group in footer), sum(group.num_rows for group in footer)
        batches = file.iter_batches(_at_once(size, rows), groups, columns=names, use_threads=False)
        yield from _rows(batches, file.schema_arrow, names, first)


def read_arrow(
    address: str, start: int, stop: int | None, first: int, columns: Collection[str] | None
) -> Iterator[tuple[int, Any]]:
    """(row's number, row) of record batches `start` to `stop` of a file or a stream. `columns`: see read_parquet."""
    with _opened(address, mapped=True) as opened:
        batches = _batches(opened, start, stop)
        for head in batches:
            names = _wanted(head.schema, columns)
            yield from _rows(_slices(head, batches), head.schema, names, first)


def _wanted(schema: pa.Schema, columns: Collection[str] | None) -> list[str]:
    """All columns where none is wanted: a row must be accounted for even if it has nothing that can be used."""
    return [name for name in schema.names if columns is None or name in columns] or list(schema.names)


@contextmanager
def _opened(address: str, mapped: bool = False) -> Iterator[Any]:
    """`mapped`: batches that are passed over are not read."""
    if is_local(address):
        with pa.memory_map(address) if mapped else pa.OSFile(address) as opened:
            yield opened
        return
    system, path = file_system(address)
    with system.open(path, "rb") as remote:
        yield pa.PythonFile(remote, mode="r")


def _batches(opened: Any, start: int, stop: int | None) -> Iterator[pa.RecordBatch]:
    magic = opened.read(6)
    opened.seek(0)
    if magic == b"ARROW1":
        file = pa.ipc.open_file(opened)
        for number in range(start, file.num_record_batches if stop is None else stop):
            yield file.get_batch(number)
    else:  # a stream, as data sets are cached
        for number, batch in enumerate(pa.ipc.open_stream(opened)):
            if stop is not None and number >= stop:
                return
            if number >= start:
                yield batch


def _slices(head: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    batch: pa.RecordBatch | None = head
    while batch is not None:
        step = _at_once(batch.nbytes, batch.num_rows)
        for start in range(0, batch.num_rows, step):
            yield batch.slice(start, step)
        batch = next(rest, None)


def _at_once(size: int, rows: int) -> int:
    """How many of `rows` of `size` bytes are taken at once."""
    return min(AT_ONCE, max(1, BYTES_AT_ONCE * rows // max(1, size)))


def _rows(
    batches: Iterator[pa.RecordBatch], schema: pa.Schema, names: list[str], first: int
) -> Iterator[tuple[int, Any]]:
    mends = {name: mend_of(schema.field(name).type) for name in names}
    number = first
    for batch in batches:
        _check(batch)
        try:
            rows: list[Any] = _values(batch, mends)
        except (ValueError, OverflowError, pa.ArrowException):
            rows = [_one(batch.slice(place, 1), mends) for place in range(batch.num_rows)]
        for row in rows:
            yield number, row
            number += 1


def _check(batch: pa.RecordBatch) -> None:
    """Refuses a batch whose parts point outside of it; text that is not UTF-8 is one row's fault.

    Raises:
        ArrowInvalid: the file is damaged.
    """
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise


def _values(batch: pa.RecordBatch, mends: dict[str, Mend | None]) -> list[dict[str, Any]]:
    columns = []
    for name, mend in mends.items():
        values = batch.column(name).to_pylist(maps_as_pydicts="lossy")
        columns.append([mend(value) for value in values] if mend else values)
    return [dict(zip(mends, cells, strict=True)) for cells in zip(*columns, strict=True)]


def _one(row: pa.RecordBatch, mends: dict[str, Mend | None]) -> dict[str, Any] | BadRow:
    """A row of a batch that has a cell Python cannot hold: text that is not UTF-8, a time before its calendar."""
    for name, mend in mends.items():
        try:
            _values(row, {name: mend})
        except UnicodeDecodeError as error:
            found = f"column {name}: {quoted(error.object[max(0, error.start - 10) : error.start + 10])}"
            return BadRow("a cell that is not UTF-8", "write the column again as text", found)
        except (ValueError, OverflowError, pa.ArrowException) as error:
            found = f"column {name}: {str(error).splitlines()[0]}"
            return BadRow("a cell that cannot be read", "leave the column out or write it as text", found)
    return _values(row, mends)[0]


def mend_of(kind: pa.DataType, name: str = "") -> Mend | None:
    """What turns a value of Arrow type `kind` back into what was written; None where nothing is to do.

    A column of structs has every field that any row has, null where a row lacks it. Such nulls go, or every tool
    would have all other tools' parameters. A struct that is there but empty stays, except as one of the
    "properties" of a JSON schema: casts make empty structs of nulls.

    Args:
        name: of the field that holds the value.
    """
    if pa.types.is_struct(kind):
        return _mend_struct(kind, name)
    if pa.types.is_map(kind) and (mend := mend_of(kind.item_type)):
        return partial(_mend_map, mend)
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if listed and (mend := mend_of(kind.value_type)):
        return partial(_mend_list, mend)
    if isinstance(kind, pa.JsonType):
        return lambda value: value if value is None else json.loads(value)
    return None


def _mend_map(mend: Mend, value: Any) -> Any:
    return value and {key: mend(item) for key, item in value.items()}


def _mend_list(mend: Mend, value: Any) -> Any:
    return value and [mend(item) for item in value]


def _mend_struct(kind: pa.StructType, name: str) -> Mend:
    fields = [kind.field(number) for number in range(kind.num_fields)]
    mends = {field.name: found for field in fields if (found := mend_of(field.type, field.name))}
    as_schemas = name == "properties"

    def mend(value: Any) -> Any:
        if value is None:
            return None
        kept = {}
        for key, item in value.items():
            if item is None:
                continue
            whole = mends[key](item) if key in mends else item
            if not (as_schemas and item and whole == {}):
                kept[key] = whole
        return kept

    return mend
