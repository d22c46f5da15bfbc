"""The sample order depends on (seed, epoch, step) alone, and a plan deals every sample out once."""

from __future__ import annotations

import numpy as np
import pytest

from tasks.data.order import SampleOrder, deal, epoch_order


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
