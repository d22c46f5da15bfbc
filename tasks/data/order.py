"""Which samples a step sees, and how a plan deals them out. World size never enters the first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tasks.params import Params

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser (Steele, Lea, Flood 2014): a fixed bijection, equal on every machine."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _draw(seed: int, epoch: int, count: int, stream: int = 0) -> NDArray[np.uint64]:
    """Random numbers of an epoch, shape (count,), from (seed, epoch, stream) alone.

    Not numpy's own generators, whose streams may change between numpy versions.
    """
    with np.errstate(over="ignore"):
        key = _mix(np.array([seed], dtype=np.uint64) + GOLDEN)
        key = _mix(key + np.uint64(epoch + 1) * GOLDEN)
        if stream:
            key = _mix(key + np.uint64(stream))
        return _mix(key + (np.arange(count, dtype=np.uint64) + np.uint64(1)) * GOLDEN)


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, rows: int) -> NDArray[np.int64]:
    """A permutation of range(rows), shape (rows,), that depends on (seed, epoch) alone."""
    return np.argsort(_draw(seed, epoch, rows), kind="stable").astype(np.int64)


def length_order(seed: int, epoch: int, lengths: NDArray[np.int64], batch: int) -> NDArray[np.int64]:
    """A permutation of the rows, shape (rows,), whose steps of `batch` rows hold rows of like length.

    Rows are sorted by length, each taken for up to 6 % longer than it is, so that a step's rows are not always the
    same; what is sorted is cut into steps, and the steps are shuffled. The first has the longest row, so that memory
    that will not do shows at once. The short step of an epoch's end comes last, and is cut out elsewhere each time.
    """
    drawn = _draw(seed, epoch, len(lengths), stream=1)
    size = np.asarray(lengths, dtype=np.int64) * ((1 << 14) + (drawn & np.uint64(1023)).astype(np.int64))
    size[np.argmax(lengths)] = size.max() + 1
    falling = np.lexsort((drawn, -size)).astype(np.int64)
    whole, short = divmod(len(lengths), batch)
    if not whole:
        return falling
    places = _draw(seed, epoch, whole, stream=2)
    gap = batch * (1 + int(places[0] % np.uint64(whole)))
    kept = np.concatenate([falling[:gap], falling[gap + short :]]).reshape(whole, batch)
    later = 1 + np.argsort(places[1:], kind="stable")
    steps = kept[np.concatenate([[0], later])]
    return np.concatenate([steps.reshape(-1), falling[gap : gap + short]])


@dataclass(frozen=True)
class SampleOrder:
    """The samples of every optimizer step: `global_batch` of them, fewer at an epoch's end.

    With `lengths` (tokens of each row, shape (rows,)) a step's samples are of like length.
    """

    rows: int
    global_batch: int
    seed: int
    lengths: NDArray[np.int64] | None = field(default=None, compare=False, repr=False)
    _epochs: dict[int, NDArray[np.int64]] = field(default_factory=dict, init=False, compare=False, repr=False)

    @classmethod
    def of(cls, params: Params, lengths: NDArray[np.int64]) -> SampleOrder:
        """The order that params.yaml asks for over rows of `lengths` tokens."""
        grouped = lengths if params.train.sample_order == "by_length" else None
        return cls(len(lengths), params.global_batch, params.seed, grouped)

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.rows / self.global_batch)

    def samples(self, step: int) -> NDArray[np.int64]:
        """Row numbers of `step` (from 0)."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return self._epoch(epoch)[within * self.global_batch : (within + 1) * self.global_batch]

    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        if self.lengths is None:
            return epoch_order(self.seed, epoch, self.rows)
        if epoch not in self._epochs:
            self._epochs.clear()
            self._epochs[epoch] = length_order(self.seed, epoch, self.lengths, self.global_batch)
        return self._epochs[epoch]

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
