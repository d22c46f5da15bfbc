"""Held-out rows that nearly repeat a row that is trained on: found a part of the held-out rows at a time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.data.alike import Index
from tasks.data.crew import Crew
from tasks.data.merge import NEAR, TRAIN, VALIDATION, Merge
from tasks.stage import progress

Array = NDArray[Any]

INDEXED = 4 << 20  # word pairs of held-out rows compared at once, about 100 bytes of memory each


@dataclass(frozen=True)
class _Search:
    """Which rows of an index resemble those of one bucket that are trained on."""

    index: Path
    merge: Merge
    bucket: int
    fates: Array


def mark_near_duplicates(
    merge: Merge, fates: Sequence[Array], threshold: float, folder: Path, crew: Crew
) -> None:
    """Turns VALIDATION into NEAR in `fates` (one array a bucket) where a row repeats a training row.

    Args:
        threshold: Jaccard similarity of the rows' word pairs from which on they count as repeated.
        folder: for the index, while it is used.
    """
    shutil.rmtree(folder, ignore_errors=True)
    with progress("compare with held-out rows", 0) as bar:
        for part, (buckets, pairs, sizes) in enumerate(_parts(merge, fates)):
            bar.total = merge.rows * (part + 1)
            place = folder / str(part)
            Index.of(pairs, sizes, threshold).write(place)
            alike = np.zeros(len(sizes), dtype=bool)
            searches = (_Search(place, merge, bucket, fates[bucket]) for bucket in range(merge.buckets))
            for bucket, found in enumerate(crew.ordered(_search, searches)):
                alike[found] = True
                bar.update(len(fates[bucket]))
            _mark(fates, buckets, alike)
            shutil.rmtree(place)
    shutil.rmtree(folder, ignore_errors=True)


def _search(search: _Search) -> Array:
    pairs, sizes = _of_bucket(search.merge, search.bucket, search.fates, TRAIN)
    return Index.read(search.index).alike(pairs, sizes)


def _parts(merge: Merge, fates: Sequence[Array]) -> Iterator[tuple[range, Array, Array]]:
    """(buckets, word pairs of the held-out rows in them, sizes): as many buckets as are compared at once."""
    start = 0
    held: list[tuple[Array, Array]] = []
    for bucket in range(merge.buckets):
        pairs, sizes = _of_bucket(merge, bucket, fates[bucket], VALIDATION)
        rows, known = (sum(len(one[place]) for one in held) for place in (1, 0))
        if rows and known + len(pairs) > INDEXED:
            yield range(start, bucket), *_joined(held)
            start, held = bucket, []
        held.append((pairs, sizes))
    if any(len(sizes) for _, sizes in held):
        yield range(start, merge.buckets), *_joined(held)


def _joined(held: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    return np.concatenate([pairs for pairs, _ in held]), np.concatenate([sizes for _, sizes in held])


def _of_bucket(merge: Merge, bucket: int, fates: Array, fate: int) -> tuple[Array, Array]:
    """(word pairs, sizes) of the bucket's rows of this fate, in the order of ids."""
    order, column = merge.column(bucket, "pairs")
    pairs = column.take(order[fates == fate]).combine_chunks()
    return pairs.flatten().to_numpy(), np.diff(pairs.offsets.to_numpy()).astype(np.int64)


def _mark(fates: Sequence[Array], buckets: range, alike: Array) -> None:
    start = 0
    for bucket in buckets:
        held = np.flatnonzero(fates[bucket] == VALIDATION)
        fates[bucket][held[alike[start : start + len(held)]]] = NEAR
        start += len(held)
