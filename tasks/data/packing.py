"""Packing: several rows, kept apart by the trainer, in one of at most max_length tokens."""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tasks.contracts import PackCounts
from tasks.data.prepared import Split, StoredImage

FILE = "train_packs.arrow"  # beside train.arrow
# Packs are nearly full: filled up to a multiple of so many tokens, most micro-batches have one shape, which spares
# compiled layers and pipelines others.
ROUNDED = 64


@dataclass(frozen=True)
class Packs:
    """Which rows are together. Pack p holds `rows[offsets[p]:offsets[p + 1]]`; offsets have shape (packs + 1,)."""

    rows: NDArray[np.int64]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def of(self, pack: int) -> NDArray[np.int64]:
        return self.rows[self.offsets[pack] : self.offsets[pack + 1]]

    def sums(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sum of one value a row over each pack's rows, shape (packs,)."""
        running = np.concatenate([[0], np.cumsum(values[self.rows], dtype=np.int64)])
        found: NDArray[np.int64] = running[self.offsets[1:]] - running[self.offsets[:-1]]
        return found


def best_fit(lengths: NDArray[np.int64], max_length: int) -> Packs:
    """Best-fit-decreasing: the longest row first, each into the pack with the least room that it fits into.

    Rows of one length are placed together: a pack that is the best fit stays so until it is full, and others with the
    same room follow. So the work is a sort and, for each distinct length, at most log2(max_length) visits to packs of
    one room. Equal lengths and equal rooms are taken in the order they come: the same rows give the same packs.

    Args:
        lengths: tokens of each row, shape (rows,).

    Raises:
        ValueError: a row is empty or longer than `max_length`.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) and not 1 <= int(lengths.min()) <= int(lengths.max()) <= max_length:
        raise ValueError(f"rows must have 1 to {max_length} tokens, and one has not")
    missing = max_length - lengths
    small = missing.astype(np.uint16) if max_length < 2**16 else missing  # which numpy sorts by radix
    order = np.argsort(small, kind="stable")
    counted = np.bincount(lengths)
    sizes = np.flatnonzero(counted)[::-1]
    pack_of = np.empty(len(lengths), dtype=np.int64)  # by place in `order`
    rooms, place = _Rooms(max_length), 0
    for size, count in zip(sizes.tolist(), counted[sizes].tolist(), strict=True):
        left = count
        while left:
            room, packs = rooms.take(size, left)
            each = room // size
            used = min(len(packs), -(-left // each))
            placed = min(left, used * each)
            pack_of[place : place + placed] = np.repeat(packs[:used], each)[:placed]
            rooms.put_back(room, packs[used:])
            in_last = placed - (used - 1) * each
            rooms.put(room - each * size, packs[: used if in_last == each else used - 1])
            if in_last < each:
                rooms.put(room - in_last * size, packs[used - 1 : used])
            place, left = place + placed, left - placed
    by_pack = np.argsort(pack_of, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(pack_of, minlength=rooms.opened))])
    return Packs(order[by_pack].astype(np.int64), offsets.astype(np.int64))


class _Rooms:
    """Packs by the tokens that are free in them."""

    def __init__(self, max_length: int) -> None:
        self.opened = 0
        self._max_length = max_length
        self._packs: defaultdict[int, deque[NDArray[np.int64]]] = defaultdict(deque)
        self._some = 0  # bit r is set where there are packs with room r

    def take(self, size: int, count: int) -> tuple[int, NDArray[np.int64]]:
        """(room, packs): some with the least room for `size` tokens; new ones, enough for `count` rows, if none has."""
        above = self._some >> size
        if not above:
            first, self.opened = self.opened, self.opened + -(-count // (self._max_length // size))
            return self._max_length, np.arange(first, self.opened)
        room = size + (above & -above).bit_length() - 1
        packs = self._packs[room].popleft()
        if not self._packs[room]:
            self._some &= ~(1 << room)
        return room, packs

    def put(self, room: int, packs: NDArray[np.int64]) -> None:
        if len(packs) and room:
            self._packs[room].append(packs)
            self._some |= 1 << room

    def put_back(self, room: int, packs: NDArray[np.int64]) -> None:
        """To the head of the queue: they go on where they were."""
        if len(packs):
            self._packs[room].appendleft(packs)
            self._some |= 1 << room


# --- beside the split ---------------------------------------------------------------------------


def write_packs(folder: Path, lengths: NDArray[np.int64], max_length: int) -> PackCounts:
    """Packs the training rows and writes which are together into `folder`, where train.arrow lies.

    Args:
        lengths: tokens of each row of train.arrow, in its order.
    """
    packs = best_fit(lengths, max_length)
    column = pa.ListArray.from_arrays(pa.array(packs.offsets, pa.int32()), pa.array(packs.rows, pa.int32()))
    schema = pa.schema([("rows", column.type)], metadata={"max_length": str(max_length)})
    with pa.OSFile(str(folder / FILE), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_table(pa.table([column], schema=schema))
    held, total = packs.sums(lengths), int(lengths.sum())
    digest = hashlib.sha256(f"{max_length}\n".encode())
    for values in (packs.offsets, packs.rows):
        digest.update(values.astype("<i8").tobytes())
    return PackCounts(
        packs=len(packs),
        fill=round(total / max(1, len(packs) * max_length), 6),
        longest=width(int(held.max(initial=0)), max_length),
        attended=round(attended(lengths), 3),
        content_hash=digest.hexdigest(),
    )


def attended(lengths: NDArray[np.int64]) -> float:
    """Tokens of the document that an average token is in."""
    return float(np.square(lengths, dtype=np.float64).sum()) / max(1, int(lengths.sum()))


def width(longest: int, max_length: int) -> int:
    """What a micro-batch is filled up to whose longest pack has so many tokens."""
    return max(longest, min(max_length, longest + -longest % ROUNDED))


class Rows(Protocol):
    """What is trained on: rows of a split, or packs of them."""

    def __len__(self) -> int: ...

    def lengths(self) -> NDArray[np.int64]: ...

    def target_counts(self) -> NDArray[np.int64]: ...

    def tokens(self, row: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...

    def images(self, row: int) -> list[StoredImage]: ...


@dataclass(frozen=True)
class PackedSplit:
    """A split whose rows are packs. What was a row is a document of one."""

    split: Split
    packs: Packs
    max_length: int

    def __len__(self) -> int:
        return len(self.packs)

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each pack, shape (packs,)."""
        return self.packs.sums(self.split.lengths())

    def target_counts(self) -> NDArray[np.int64]:
        """Learnt tokens of each pack, shape (packs,); the first of a document never is."""
        return self.packs.sums(self.split.target_counts())

    def documents(self, pack: int) -> NDArray[np.int64]:
        """Tokens of each document of `pack`, shape (documents,)."""
        ids = self.split.table.column("input_ids")
        return np.array([len(ids[int(row)]) for row in self.packs.of(pack)], dtype=np.int64)

    def tokens(self, pack: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(input_ids, labels) of all documents, one after another, each of shape (tokens,).

        The first label of a document is -100: nothing in it could predict that token.
        """
        ids, labels = zip(*(self.split.tokens(int(row)) for row in self.packs.of(pack)), strict=True)
        joined = np.concatenate(labels)
        joined[np.cumsum([0, *(len(part) for part in labels[:-1])])] = -100
        return np.concatenate(ids), joined

    def images(self, pack: int) -> list[StoredImage]:
        """The pictures of all documents, in the order of their tokens."""
        return [image for row in self.packs.of(pack) for image in self.split.images(int(row))]

    def attended(self) -> float:
        """Tokens of the document that an average token is in."""
        return attended(self.split.lengths())


def training_rows(folder: Path) -> Split | PackedSplit:
    """What is trained on: the packs of data/prepared, or its rows where nothing is packed.

    Raises:
        UserError: prepare_data has not written it.
    """
    split = Split.open(folder, "train")
    if not (folder / FILE).is_file():
        return split
    with pa.memory_map(str(folder / FILE)) as source:
        table = pa.ipc.open_file(source).read_all()
    column = table.column("rows").combine_chunks()
    packs = Packs(column.values.to_numpy().astype(np.int64), column.offsets.to_numpy().astype(np.int64))
    return PackedSplit(split, packs, int(table.schema.metadata[b"max_length"]))
