"""All runs as one sequence in the order of ids, and what becomes of each row: one byte of memory a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tasks.data.runs import KEYS, chosen, read_bucket
from tasks.data.split import copies, held_out

Array = NDArray[Any]

ORDERING = ("high", "low", "position")
# What becomes of a row. BEYOND: behind max_rows. UNUSED: not in the share that its source's weight takes.
BEYOND, DUPLICATE, UNUSED, TRAIN, VALIDATION, NEAR = range(6)


@dataclass(frozen=True)
class Run:
    """A sorted run. `shard`: its number in the order of the sources. `limit`: rows of the shard that count."""

    path: Path
    rows: int
    shard: int
    source: int
    limit: int


@dataclass(frozen=True)
class Bucket:
    """The rows of one range of ids, in the order of (id, shard, position); arrays of shape (rows,)."""

    number: int
    order: Array  # places in the runs' batches, put one after another
    run: Array
    keys: dict[str, Array]

    def __len__(self) -> int:
        return len(self.order)


@dataclass(frozen=True)
class Merge:
    """The runs of all shards, and the weight of each source."""

    runs: tuple[Run, ...]
    weights: tuple[float, ...]
    buckets: int

    @property
    def rows(self) -> int:
        return sum(run.rows for run in self.runs)

    @cached_property
    def _shards(self) -> Array:
        return np.array([run.shard for run in self.runs], dtype=np.int64)

    def read(self, number: int, columns: Sequence[str]) -> pa.Table:
        """These columns of a bucket, run after run."""
        batches = [read_bucket(run.path, number, columns) for run in self.runs]
        return pa.Table.from_batches(batches, chosen(columns))

    def bucket(self, number: int) -> Bucket:
        """The keys of a bucket, merged."""
        table = self.read(number, KEYS)
        order, run = self._order(table)
        return Bucket(number, order, run[order], {name: table[name].to_numpy()[order] for name in KEYS})

    def column(self, number: int, name: str) -> tuple[Array, pa.ChunkedArray]:
        """(the order of a bucket's rows, this column run after run), with no other key read than those that order."""
        table = self.read(number, (*ORDERING, name))
        return self._order(table)[0], table[name]

    def _order(self, table: pa.Table) -> tuple[Array, Array]:
        """(places in the order of (id, shard, position); the run of each place)."""
        run = np.repeat(np.arange(len(self.runs)), [len(chunk) for chunk in table["high"].chunks])
        high, low, position = (table[name].to_numpy() for name in ORDERING)
        return np.lexsort((position, self._shards[run], low, high)), run

    def __iter__(self) -> Iterator[Bucket]:
        return map(self.bucket, range(self.buckets))

    def source(self, bucket: Bucket) -> Array:
        """Number of the source of each row, shape (rows,)."""
        return np.array([run.source for run in self.runs], dtype=np.int64)[bucket.run]

    def copies(self, bucket: Bucket) -> Array:
        """How often each row's source gives it, shape (rows,)."""
        source = self.source(bucket)
        found = np.zeros(len(bucket), dtype=np.int64)
        for number, weight in enumerate(self.weights):
            of_source = source == number
            found[of_source] = copies(bucket.keys["low"][of_source], weight)
        return found

    def fates(self, bucket: Bucket, validation_fraction: float) -> Array:
        """What becomes of each row, near-duplicates aside: uint8, shape (rows,).

        Of equal rows the first one in the order of the sources stands for all.
        """
        limits = np.array([run.limit for run in self.runs], dtype=np.int64)
        fate = np.where(held_out(bucket.keys["draw"], validation_fraction), VALIDATION, TRAIN).astype(
            np.uint8
        )
        counted = bucket.keys["position"].astype(np.int64) < limits[bucket.run]
        fate[self.copies(bucket) == 0] = UNUSED
        fate[_repeats(bucket.keys["high"], bucket.keys["low"], counted)] = DUPLICATE
        fate[~counted] = BEYOND
        return fate


def _repeats(high: Array, low: Array, counted: Array) -> Array:
    """Whether an equal row stands before each, among those that count; equal rows are neighbours."""
    repeats = np.zeros(len(high), dtype=bool)
    places = np.flatnonzero(counted)
    same = (np.diff(high[places]) == 0) & (np.diff(low[places]) == 0)
    repeats[places[1:][same]] = True
    return repeats
