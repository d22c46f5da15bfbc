"""What ZeRO leaves a rank of a parameter: a run of its numbers in row-major order, written and read as boxes.

A checkpoint knows boxes alone, so it does not matter to any plan that another one cut along no dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from tasks.trainer.pieces import Box


@dataclass(frozen=True)
class Fragment:
    """Numbers `start` to `start + size` of the trainable parameter `name` of the whole model, row-major.

    They lie at `at` in this rank's flat buffer number `group`.
    """

    name: str
    shape: torch.Size
    start: int
    size: int
    group: int
    at: int

    def box(self, flat: torch.Tensor) -> Box:
        """A flat buffer (weights or a moment) as what it holds of this parameter: views of it."""
        mine = flat.detach().narrow(0, self.at, self.size)
        inside, before = {}, 0
        for chunk in boxes_of_run(self.shape, self.start, self.size):
            numbers = prod(chunk.sizes)
            inside[chunk.offsets] = mine.narrow(0, before, numbers).view(chunk.sizes)
            before += numbers
        return Box.holding(inside, self.shape, mine)


def boxes_of_run(shape: torch.Size, start: int, size: int) -> Iterator[ChunkStorageMetadata]:
    """The fewest boxes that a run of row-major numbers is, in its order: part of a row, whole rows, part of a row."""
    if not size:
        return
    if len(shape) <= 1:
        yield ChunkStorageMetadata(torch.Size([start] * len(shape)), torch.Size([size] * len(shape)))
        return
    row = prod(shape[1:])
    end = start + size
    first, last = -(-start // row), end // row  # whole rows
    if first > last:  # within one row
        yield from _within(shape, start // row, start % row, size)
        return
    if start < first * row:
        yield from _within(shape, first - 1, start % row, first * row - start)
    if last > first:
        zeros = [0] * (len(shape) - 1)
        yield ChunkStorageMetadata(torch.Size([first, *zeros]), torch.Size([last - first, *shape[1:]]))
    if end > last * row:
        yield from _within(shape, last, 0, end - last * row)


def _within(shape: torch.Size, row: int, start: int, size: int) -> Iterator[ChunkStorageMetadata]:
    for chunk in boxes_of_run(torch.Size(shape[1:]), start, size):
        yield ChunkStorageMetadata(torch.Size([row, *chunk.offsets]), torch.Size([1, *chunk.sizes]))
