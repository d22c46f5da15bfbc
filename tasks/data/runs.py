"""Sorted runs: the encoded rows of a part of the sources, on disk in the order of their ids.

The batches of a run are buckets: equal ranges of ids, the same in every run. So all runs are merged bucket by
bucket, and the memory for it does not depend on how many rows there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tasks.data.alike import word_pairs
from tasks.data.prepared import IGNORED, target_counts
from tasks.data.row_prompt import prompt_of
from tasks.data.rows import Row
from tasks.data.split import draws
from tasks.data.templates import Encoded

Array = NDArray[Any]

KEYS = ("high", "low", "draw", "position", "length", "targets", "cut", "piece", "shown", "image_tokens")
SCHEMA = pa.schema(
    [
        ("high", pa.uint64()),  # the id's first half
        ("low", pa.uint64()),
        ("draw", pa.uint64()),  # says on which side of the split the row's group is
        ("position", pa.uint32()),  # in its shard
        ("length", pa.uint32()),
        ("targets", pa.uint32()),
        ("cut", pa.bool_()),
        ("piece", pa.bool_()),  # of a text, and not its first
        ("shown", pa.uint32()),  # pictures among the ids
        ("image_tokens", pa.uint32()),
        ("input_ids", pa.list_(pa.int32())),
        ("learnt", pa.list_(pa.bool_())),
        ("prompt", pa.string()),
        ("reference", pa.string()),
        ("where", pa.string()),
        ("pairs", pa.list_(pa.uint32())),  # of words
        ("pictures", pa.list_(pa.binary(16))),  # identities, those that are cut off included
    ]
)
RUN_BYTES = 64 << 20  # what a worker holds before it sorts and writes
CODEC = "lz4"


class Keyed(NamedTuple):
    """A row, what it became, its position in its shard, and whether it is a later piece of a text.

    prompt: its turns before the last answer where its template takes them otherwise, for their pictures.
    """

    row: Row
    encoded: Encoded
    position: int
    piece: bool
    prompt: list[dict[str, Any]] | None = None


class RunWriter:
    """Writes rows as runs `0.arrow`, `1.arrow`, … of a folder, each of about RUN_BYTES in memory."""

    def __init__(self, folder: Path, buckets: int) -> None:
        self._folder, self._buckets = folder, buckets
        self._batches: list[pa.RecordBatch] = []
        self.rows: list[int] = []  # of each run

    def add(self, rows: Sequence[Keyed]) -> None:
        if not rows:
            return
        self._batches.append(_batch(rows))
        if sum(batch.nbytes for batch in self._batches) > RUN_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes what is held; to be called once more at the end."""
        if not self._batches:
            return
        table = pa.Table.from_batches(self._batches, SCHEMA)
        high = table["high"].to_numpy()
        order = np.lexsort((table["low"].to_numpy(), high))  # stable: the source's order among equals
        ordered = table.take(order).combine_chunks()
        bounds = bucket_bounds(high[order], self._buckets)
        path = self._folder / f"{len(self.rows)}.arrow"
        options = pa.ipc.IpcWriteOptions(compression=CODEC)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, SCHEMA, options=options) as writer:
            for start, end in pairwise(bounds):
                writer.write_batch(_one_batch(ordered.slice(start, end - start)))
        self.rows.append(table.num_rows)
        self._batches = []


def bucket_bounds(high: Array, buckets: int) -> list[int]:
    """Where each bucket starts in rising `high` halves of ids, and the end; buckets is a power of two."""
    shift = np.uint64(64 - (buckets.bit_length() - 1))
    firsts = np.arange(1, buckets, dtype=np.uint64) << shift if buckets > 1 else np.zeros(0, np.uint64)
    return [0, *np.searchsorted(high, firsts).tolist(), len(high)]


def read_bucket(path: Path, bucket: int, columns: Iterable[str]) -> pa.RecordBatch:
    """One bucket of a run, these columns alone; not memory-mapped, so that reading leaves no pages behind."""
    wanted = [SCHEMA.get_field_index(name) for name in chosen(columns).names]
    options = pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
    with pa.OSFile(str(path)) as source:
        batch: pa.RecordBatch = pa.ipc.open_file(source, options=options).get_batch(bucket)
    return batch


def chosen(columns: Iterable[str]) -> pa.Schema:
    """These columns of a run, in its order."""
    wanted = set(columns)
    return pa.schema([field for field in SCHEMA if field.name in wanted])


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    if not batches:
        return pa.RecordBatch.from_pylist([], schema=SCHEMA)
    (batch,) = batches
    return batch


def _batch(rows: Sequence[Keyed]) -> pa.RecordBatch:
    ids = b"".join(bytes.fromhex(item.row.id) for item in rows)
    halves = np.frombuffer(ids, dtype=">u8").astype(np.uint64).reshape(-1, 2)
    lengths = np.array([len(item.encoded.input_ids) for item in rows], dtype=np.int64)
    tokens = flat((item.encoded.input_ids for item in rows), np.int32)
    labels = flat((item.encoded.labels for item in rows), np.int32)
    learnt = labels != IGNORED
    assert len(labels) == len(tokens) and np.array_equal(labels[learnt], tokens[learnt])
    pairs, sizes = word_pairs([item.row for item in rows])
    columns = {
        "high": halves[:, 0],
        "low": halves[:, 1],
        "draw": draws(item.row.group for item in rows),
        "position": np.array([item.position for item in rows], dtype=np.uint32),
        "length": lengths.astype(np.uint32),
        "targets": target_counts(learnt, lengths).astype(np.uint32),
        "cut": [item.encoded.truncated for item in rows],
        "piece": [item.piece for item in rows],
        "shown": np.array([item.encoded.shown for item in rows], dtype=np.uint32),
        "image_tokens": np.array([item.encoded.image_tokens for item in rows], dtype=np.uint32),
        "input_ids": lists(tokens, lengths),
        "learnt": lists(learnt, lengths),
        "prompt": [prompt_of(item.row, item.prompt) for item in rows],
        "reference": [item.row.answer for item in rows],
        "where": [item.row.where for item in rows],
        "pairs": lists(pairs, sizes),
        "pictures": [[picture.identity for picture in item.row.pictures] for item in rows],
    }
    return pa.record_batch(columns, schema=SCHEMA)


def flat(values: Iterable[Sequence[int]], kind: type[np.int32]) -> Array:
    """Lists or arrays of numbers, one after another."""
    held = list(values)
    if held and isinstance(held[0], np.ndarray):
        return np.concatenate(held).astype(kind, copy=False)
    return np.fromiter(chain.from_iterable(held), kind)


def lists(values: Array, sizes: Array) -> pa.ListArray:
    """An Arrow array of lists from their values, one after another, and how many each has."""
    ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(values))
