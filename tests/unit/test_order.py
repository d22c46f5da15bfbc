"""The sample order depends on (seed, epoch, step) alone, and a plan deals every sample out once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from tasks.data.order import SampleOrder, deal, epoch_order, length_order
from tests import tiny


def test_an_epoch_is_a_permutation_and_never_the_same_twice() -> None:
    first, second = epoch_order(7, 0, 1000), epoch_order(7, 1, 1000)
    assert sorted(first.tolist()) == list(range(1000))
    assert sorted(second.tolist()) == list(range(1000))
    assert first.tolist() != second.tolist()
    assert epoch_order(8, 0, 1000).tolist() != first.tolist()


def test_the_order_is_golden() -> None:
    """A change here makes every half-trained run wrong: bump NUMERICS_VERSION with it.

    Derived again with Python's own integers, and pinned as numbers.
    """
    mask, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(value: int) -> int:
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & mask
        value = (value ^ value >> 27) * 0x94D049BB133111EB & mask
        return value ^ value >> 31

    key = mix(mix((42 + golden) & mask) + golden & mask)
    expected = sorted(range(8), key=lambda row: mix(key + (row + 1) * golden & mask))
    assert epoch_order(42, 0, 8).tolist() == expected == [6, 2, 5, 7, 0, 4, 3, 1]


def test_the_last_step_of_an_epoch_is_short_and_epochs_do_not_mix() -> None:
    order = SampleOrder(rows=10, global_batch=4, seed=1)
    sizes = [len(order.samples(step)) for step in range(6)]
    assert sizes == [4, 4, 2, 4, 4, 2]
    assert sorted(np.concatenate([order.samples(step) for step in range(3)]).tolist()) == list(range(10))
    assert [order.samples_seen(steps) for steps in range(7)] == [0, 4, 8, 10, 14, 18, 20]


def test_a_token_budget_counts_whole_steps() -> None:
    order = SampleOrder(rows=10, global_batch=4, seed=1)
    lengths = np.full(10, 10)
    assert order.steps(1, lengths, None) == 3
    assert order.steps(2.5, lengths, None) == 8
    assert order.steps(1, lengths, 80) == 2
    assert order.steps(1, lengths, 79) == 1
    assert order.steps(1, lengths, 1) == 1
    assert order.steps(1, lengths, 1000) == 3


@pytest.mark.parametrize(
    ("micro", "degree", "samples"), [(1, 1, 7), (2, 1, 8), (2, 2, 8), (3, 2, 7), (2, 4, 5), (4, 3, 1)]
)
def test_every_sample_is_dealt_to_exactly_one_rank(micro: int, degree: int, samples: int) -> None:
    lengths = np.array([(row * 13) % 50 + 1 for row in range(samples)])
    ranks = [deal(list(range(samples)), lengths, micro, degree, rank) for rank in range(degree)]
    assert len({len(batches) for batches in ranks}) == 1, "ranks must meet in equally many collectives"
    counted = [row for batches in ranks for batch in batches if batch.counted for row in batch.rows]
    assert sorted(counted) == list(range(samples))
    assert all(1 <= len(batch.rows) <= micro for batches in ranks for batch in batches)


def test_dealing_balances_lengths() -> None:
    lengths = np.arange(1, 65)
    loads = [
        sum(int(lengths[row]) for batch in deal(list(range(64)), lengths, 4, 2, rank) for row in batch.rows)
        for rank in range(2)
    ]
    assert abs(loads[0] - loads[1]) <= 64


# --- by length ----------------------------------------------------------------------------------


def tailed(rows: int) -> np.ndarray:
    return np.random.RandomState(rows).lognormal(5, 1, rows).clip(8, 4096).astype(np.int64)


def padding(order: SampleOrder, lengths: np.ndarray, micro: int) -> float:
    """Padded over real tokens of an epoch, dealt to one rank in micro-batches of so many rows."""
    filled = real = 0
    for step in range(order.steps_per_epoch):
        for batch in deal(order.samples(step).tolist(), lengths, micro, 1, 0):
            held = lengths[list(batch.rows)]
            filled, real = filled + int(held.max()) * len(held), real + int(held.sum())
    return filled / real - 1


@pytest.mark.parametrize(("rows", "batch"), [(1, 4), (3, 4), (4, 4), (11, 4), (200, 16), (1003, 16)])
def test_by_length_every_row_comes_once_an_epoch(rows: int, batch: int) -> None:
    lengths = tailed(rows)
    for epoch in range(3):
        found = length_order(5, epoch, lengths, batch)
        assert sorted(found.tolist()) == list(range(rows))
        assert np.array_equal(found, length_order(5, epoch, lengths, batch)), (
            "a function of its arguments alone"
        )
        if rows >= batch:
            assert int(lengths.argmax()) in found[:batch], "memory that will not do shows at once"
    if rows > 50 * batch:
        one, other = (length_order(5, epoch, lengths, batch) for epoch in (0, 1))
        steps = [
            {frozenset(found[at : at + batch].tolist()) for at in range(0, rows, batch)}
            for found in (one, other)
        ]
        assert len(steps[0] & steps[1]) < len(steps[0]) / 2, "other rows are together in another epoch"
        assert not np.array_equal(one, length_order(6, 0, lengths, batch))


def test_by_length_steps_hold_rows_of_like_length_in_no_order() -> None:
    lengths = tailed(2000)
    order = SampleOrder(2000, 16, 3, lengths)
    means = []
    for step in range(1, order.steps_per_epoch):
        held = lengths[order.samples(step)]
        assert held.max() <= 1.3 * held.min() + 6
        means.append(held.mean())
    falling = sum(left > right for left, right in pairwise(means))
    assert 0.35 < falling / len(means) < 0.65
    shuffled = SampleOrder(2000, 16, 3)
    assert padding(order, lengths, 8) < 0.05
    assert padding(shuffled, lengths, 8) > 0.4


def test_the_order_is_that_of_the_recipe() -> None:
    lengths = tailed(50)
    plain = SampleOrder.of(tiny.params(**{"seed": 9}), lengths)
    assert plain == SampleOrder(50, 16, 9)
    assert np.array_equal(plain.samples(0), epoch_order(9, 0, 50)[:16])
    grouped = SampleOrder.of(tiny.params(**{"seed": 9, "train.sample_order": "by_length"}), lengths)
    for step in (0, 3, 4, 1):
        epoch, within = divmod(step, 4)
        expected = length_order(9, epoch, lengths, 16)[16 * within : 16 * within + 16]
        assert np.array_equal(grouped.samples(step), expected)


def test_the_order_by_length_is_golden() -> None:
    """A change here makes every half-trained run wrong: bump NUMERICS_VERSION with it."""
    lengths = np.array([5, 9, 7, 30, 8, 6, 11, 9, 31, 10, 7])
    assert length_order(42, 0, lengths, 3).tolist() == [8, 3, 6, 2, 5, 0, 7, 4, 10, 9, 1]
