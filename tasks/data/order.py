"""Which samples a step sees, and how a plan deals them out. World size never enters the first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser (Steele, Lea, Flood 2014): a fixed bijection, equal on every machine."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, rows: int) -> NDArray[np.int64]:
    """A permutation of range(rows), shape (rows,), that depends on (seed, epoch) alone.

    Not numpy's own shuffle, whose stream may change between numpy versions.
    """
    with np.errstate(over="ignore"):
        key = _mix(np.array([seed], dtype=np.uint64) + GOLDEN)
        key = _mix(key + np.uint64(epoch + 1) * GOLDEN)
        ranks = _mix(key + (np.arange(rows, dtype=np.uint64) + np.uint64(1)) * GOLDEN)
    return np.argsort(ranks, kind="stable").astype(np.int64)


@dataclass(frozen=True)
class SampleOrder:
    """The samples of every optimizer step: `global_batch` of them, fewer at an epoch's end."""

    rows: int
    global_batch: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.rows / self.global_batch)

    def samples(self, step: int) -> NDArray[np.int64]:
        """Row numbers of `step` (from 0)."""
        epoch, within = divmod(step, self.steps_per_epoch)
        order = epoch_order(self.seed, epoch, self.rows)
        return order[within * self.global_batch : (within + 1) * self.global_batch]

    def samples_seen(self, steps: int) -> int:
        """Samples used by the first `steps` steps."""
        epochs, within = divmod(steps, self.steps_per_epoch)
        return epochs * self.rows + min(within * self.global_batch, self.rows)

    def steps(self, epochs: float, lengths: NDArray[np.int64], token_budget: int | None) -> int:
        """Optimizer steps of the run: whole steps of `epochs`, at most `token_budget` tokens, at least one.

        `lengths`: tokens of each row, shape (rows,).
        """
        total = max(1, round(epochs * self.steps_per_epoch))
        if token_budget is None:
            return total
        used = 0
        for step in range(total):
            used += int(lengths[self.samples(step)].sum())
            if used > token_budget:
                return max(1, step)
        return total


@dataclass(frozen=True)
class MicroBatch:
    """Row numbers of one forward pass. `counted` is False for a stand-in: its loss has weight zero.

    A stand-in keeps a rank that has no sample left in step with the others' collectives.
    """

    rows: tuple[int, ...]
    counted: bool


def deal(
    samples: Sequence[int], lengths: NDArray[np.int64], micro_batch: int, degree: int, rank: int
) -> list[MicroBatch]:
    """The micro-batches of data-parallel `rank` (of `degree`) for one step.

    Samples of like length go together (less padding) and neighbours to different ranks (even work).
    Every rank gets the same number of micro-batches; each sample goes to exactly one of them.
    """
    ordered = sorted((int(sample) for sample in samples), key=lambda row: (-int(lengths[row]), row))
    block = micro_batch * degree
    batches = []
    for start in range(0, len(ordered), block):
        mine = tuple(ordered[start : start + block][rank::degree])
        batches.append(MicroBatch(mine, True) if mine else MicroBatch((ordered[-1],), False))
    return batches
