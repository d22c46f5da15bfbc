"""From sorted runs to data/prepared: duplicates, the split, near-duplicates, and the files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tasks.contracts import Leakage
from tasks.data.accounts import DUPLICATE_ROW, NEAR_DUPLICATE, LeftOut
from tasks.data.album import INDEX, WIDTH, identities, write_album
from tasks.data.crew import Crew
from tasks.data.leakage import mark_near_duplicates
from tasks.data.merge import BEYOND, DUPLICATE, NEAR, TRAIN, UNUSED, VALIDATION, Bucket, Merge
from tasks.data.prepared import ALBUM
from tasks.data.store import TAKEN, SplitWriter, Tally
from tasks.params import PrepareDataParams
from tasks.stage import heartbeat, progress

Array = NDArray[Any]

SPLITS = {"train": TRAIN, "validation": VALIDATION}
WHY = {DUPLICATE: DUPLICATE_ROW, NEAR: NEAR_DUPLICATE}


@dataclass
class Assembled:
    """What was written. `sources`: (train, validation) of each source; `fates`: rows by what became of them."""

    splits: dict[str, Tally]
    sources: list[dict[str, Tally]]
    repeated: int = 0
    pictures: int = 0  # distinct ones
    pieces: int = 0  # that long texts were cut into, their first ones aside
    fates: Array = field(default_factory=lambda: np.zeros(NEAR + 1, dtype=np.int64))

    @property
    def unused(self) -> int:
        return int(self.fates[UNUSED])

    @property
    def left_out(self) -> Counter[str]:
        return Counter({why[0]: int(self.fates[kind]) for kind, why in WHY.items() if self.fates[kind]})

    def leakage(self, threshold: float) -> Leakage:
        return Leakage(
            threshold=threshold,
            held_out=int(self.fates[VALIDATION] + self.fates[NEAR]),
            near_duplicates=int(self.fates[NEAR]),
            duplicates=int(self.fates[DUPLICATE]),
        )


def decide(merge: Merge, wanted: PrepareDataParams, folder: Path, crew: Crew) -> list[Array]:
    """What becomes of every row: one array a bucket, uint8, in the order of ids; `folder` is for use meanwhile."""
    with heartbeat("looking for duplicates"):
        fates = [merge.fates(bucket, wanted.validation_fraction) for bucket in merge]
    mark_near_duplicates(merge, fates, wanted.near_duplicate_threshold, folder, crew)
    return fates


def write_splits(merge: Merge, fates: Sequence[Array], folder: Path, left_out: LeftOut) -> Assembled:
    """Writes `<split>.arrow` into `folder`, bucket after bucket, and hands on the rows that are left out."""
    album = _used_pictures(merge, fates)
    if len(album):
        write_album(_albums(merge), album, folder / ALBUM)
    found = Assembled(
        {name: Tally() for name in SPLITS}, [{name: Tally() for name in SPLITS} for _ in merge.weights]
    )
    found.pictures = len(album)
    with ExitStack() as stack:
        bar = stack.enter_context(progress("write", merge.rows))
        writers = {name: stack.enter_context(SplitWriter(folder / f"{name}.arrow", album)) for name in SPLITS}
        for bucket, fate in zip(merge, fates, strict=True):
            found.pieces += int((bucket.keys["piece"] & (fate != BEYOND)).sum())
            found.fates += np.bincount(fate, minlength=NEAR + 1)
            _write_bucket(merge, bucket, fate, writers, found)
            _leave_out(merge, bucket, fate, left_out)
            bar.update(len(bucket))
    return found


def _albums(merge: Merge) -> list[Path]:
    """The shards' folders that hold pictures, in the order of the sources."""
    folders = dict.fromkeys(run.path.parent for run in merge.runs)
    return [folder for folder in folders if (folder / INDEX).is_file()]


def _used_pictures(merge: Merge, fates: Sequence[Array]) -> Array:
    """Identities of the pictures of all rows that are kept, sorted: 16 bytes of memory a picture of a row."""
    used = [np.zeros(0, f"S{WIDTH}")]
    if not _albums(merge):
        return used[0]
    for bucket, fate in zip(merge, fates, strict=True):
        kept = bucket.order[(fate == TRAIN) | (fate == VALIDATION)]
        column = merge.read(bucket.number, ["pictures"])["pictures"].take(kept)
        used.append(np.unique(identities(column)))
    return np.unique(np.concatenate(used))


def _write_bucket(
    merge: Merge, bucket: Bucket, fate: Array, writers: dict[str, SplitWriter], found: Assembled
) -> None:
    content = merge.read(bucket.number, TAKEN)
    copies, source = merge.copies(bucket), merge.source(bucket)
    for name, writer in writers.items():
        times = np.where(fate == SPLITS[name], copies if name == "train" else 1, 0)
        found.repeated += int((times - (times > 0)).sum())
        rows: pa.Table = content.take(np.repeat(bucket.order, times))
        writer.add(rows)
        found.splits[name].add(bucket.keys, times)
        for number, tallies in enumerate(found.sources):
            tallies[name].add(bucket.keys, np.where(source == number, times, 0))


def _leave_out(merge: Merge, bucket: Bucket, fate: Array, left_out: LeftOut) -> None:
    shards = np.array([run.shard for run in merge.runs])[bucket.run]
    for kind, why in WHY.items():
        rows = np.flatnonzero(fate == kind)
        if not len(rows):
            continue
        where = merge.read(bucket.number, ["where"])["where"].take(bucket.order[rows]).to_pylist()
        positions = bucket.keys["position"][rows].tolist()
        for shard in np.unique(shards[rows]).tolist():
            chosen = np.flatnonzero(shards[rows] == shard).tolist()
            left_out.add(shard, [(positions[place], where[place]) for place in chosen], why)
