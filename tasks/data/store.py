"""Writes the prepared rows: one Arrow file a split, with bytes that depend on the content alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tasks.contracts import LengthBin, SplitCounts
from tasks.data.album import identities
from tasks.data.prepared import IGNORED
from tasks.data.runs import lists

Array = NDArray[Any]

SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("labels", pa.list_(pa.int32())),
        ("id", pa.string()),
        ("prompt", pa.string()),
        ("reference", pa.string()),
        ("images", pa.list_(pa.uint32())),  # numbers in images.arrow, those that are cut off included
        ("shown", pa.uint32()),  # how many of them are among input_ids
    ]
)
BATCH_ROWS = 1000
TAKEN = ("high", "low", "input_ids", "learnt", "prompt", "reference", "pictures", "shown")  # of a run


class SplitWriter:
    """Writes one split as rows come, in batches whose size does not depend on how they come."""

    def __init__(self, path: Path, album: Array) -> None:
        """
        Args:
            album: identities of all pictures, sorted.
        """
        self._album = album
        self._sink = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_file(self._sink, SCHEMA)
        self._held: list[pa.RecordBatch] = []
        self._rows = 0

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._rows:
            self._write(self._rows)
        self._writer.close()
        self._sink.close()

    def add(self, rows: pa.Table) -> None:
        """Adds rows of runs (columns TAKEN), which come in the order of their ids."""
        self._held += _converted(rows, self._album).to_batches()
        self._rows += rows.num_rows
        if self._rows >= BATCH_ROWS:
            self._write(self._rows - self._rows % BATCH_ROWS)

    def _write(self, count: int) -> None:
        table = pa.Table.from_batches(self._held, SCHEMA).combine_chunks()
        for start in range(0, count, BATCH_ROWS):
            # Taken, not sliced: a slice is written with what happens to stand behind it as padding.
            taken = table.take(np.arange(start, min(start + BATCH_ROWS, count)))
            self._writer.write_batch(taken.combine_chunks().to_batches()[0])
        self._held = table.slice(count).to_batches()
        self._rows -= count


def _converted(rows: pa.Table, album: Array) -> pa.Table:
    table = rows.combine_chunks()
    ids, learnt = (_list(table[name]) for name in ("input_ids", "learnt"))
    labels = np.where(
        learnt.flatten().to_numpy(zero_copy_only=False), ids.flatten().to_numpy(), np.int32(IGNORED)
    )
    halves = (
        np.stack([table["high"].to_numpy(), table["low"].to_numpy()], axis=1).astype(">u8").tobytes().hex()
    )
    numbers = np.searchsorted(album, identities(table["pictures"])).astype(np.uint32)
    columns = {
        "input_ids": ids,
        "labels": pa.ListArray.from_arrays(ids.offsets, pa.array(labels)),
        "id": [halves[start : start + 32] for start in range(0, len(halves), 32)],
        "prompt": table["prompt"],
        "reference": table["reference"],
        "images": lists(numbers, np.diff(_list(table["pictures"]).offsets.to_numpy())),
        "shown": table["shown"],
    }
    return pa.table(columns, schema=SCHEMA)


def _list(column: pa.ChunkedArray) -> pa.ListArray:
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)


@dataclass
class Tally:
    """Counts of a split's rows, added up as they come."""

    rows: int = 0
    tokens: int = 0
    target_tokens: int = 0
    longest: int = 0
    truncated: int = 0
    images: int = 0
    image_tokens: int = 0
    bins: Array = field(default_factory=lambda: np.zeros(64, dtype=np.int64))  # by powers of two

    def add(self, keys: Mapping[str, Array], times: Array) -> None:
        """Args: keys: of a bucket's rows; times: how often the split has each, shape (rows,)."""
        lengths = keys["length"].astype(np.int64)
        self.rows += int(times.sum())
        self.tokens += int((lengths * times).sum())
        self.target_tokens += int((keys["targets"].astype(np.int64) * times).sum())
        self.longest = max(self.longest, int(lengths[times > 0].max(initial=0)))
        self.truncated += int((keys["cut"] * times).sum())
        self.images += int((keys["shown"].astype(np.int64) * times).sum())
        self.image_tokens += int((keys["image_tokens"].astype(np.int64) * times).sum())
        bits = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
        self.bins += np.bincount(bits, times, minlength=64).astype(np.int64)

    @property
    def counts(self) -> SplitCounts:
        return SplitCounts(
            rows=self.rows,
            tokens=self.tokens,
            target_tokens=self.target_tokens,
            longest=self.longest,
            images=self.images,
            image_tokens=self.image_tokens,
        )


def histogram(*splits: Tally) -> tuple[LengthBin, ...]:
    """Rows by length in tokens, in bins up to powers of two from 16 on."""
    bins = sum((split.bins for split in splits), np.zeros(64, dtype=np.int64))
    bins[4] = bins[:5].sum()
    last = max(np.flatnonzero(bins), default=3)
    return tuple(LengthBin(upper=1 << bit, rows=int(bins[bit])) for bit in range(4, int(last) + 1))


def content_hash(folder: Path, splits: Mapping[str, int]) -> str:
    """Hash of what the splits (name -> rows) hold, not of the files: another Arrow version may write other bytes."""
    digest = hashlib.sha256()
    for name, rows in sorted(splits.items()):
        digest.update(f"{name} {rows}\n".encode())
        for batch in _batches(folder / f"{name}.arrow"):
            digest.update(_bytes(batch))
    return digest.hexdigest()


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    with pa.OSFile(str(path)) as source:
        reader = pa.ipc.open_file(source)
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


def _bytes(batch: pa.RecordBatch) -> bytes:
    """Of each row its id, its length, its ids and its labels, the numbers as little-endian int32."""
    ids, labels = (
        memoryview(batch.column(name).flatten().to_numpy().astype("<i4", copy=False)).cast("B")
        for name in ("input_ids", "labels")
    )
    ends = (4 * np.diff(batch.column("input_ids").offsets.to_numpy())).cumsum().tolist()
    parts: list[bytes | memoryview] = []
    start = 0
    for name, end in zip(batch.column("id").to_pylist(), ends, strict=True):
        parts += [f"{name} {(end - start) // 4}\n".encode(), ids[start:end], labels[start:end]]
        start = end
    return b"".join(parts)


def as_json(line: Mapping[str, Any]) -> str:
    return json.dumps(line, ensure_ascii=False, sort_keys=True) + "\n"
