"""The grid of ranks that a plan stands for, without any process."""

from __future__ import annotations

import pytest

from tasks.contracts import Plan
from tasks.trainer.mesh import AXES, Layout, data_rank, layout
from tests import tiny


def plan(copies: int = 1, shards: int = 1, tp: int = 1, pp: int = 1) -> Plan:
    schedule = "1f1b" if pp > 1 else "none"
    return tiny.cpu_plan(copies, shards=shards).model_copy(update={"tp": tp, "pp": pp, "schedule": schedule})


def test_one_process_has_no_axes() -> None:
    grid = layout(plan())
    assert grid == Layout((), ()) and grid.ranks == 1
    assert grid.coordinate(0) == dict.fromkeys(AXES, 0)
    assert data_rank(plan(), 0) == 0


@pytest.mark.parametrize(
    ("asked", "axes", "sizes"),
    [
        (plan(4), ("dp_replicate",), (4,)),
        (plan(1, 4), ("dp_shard",), (4,)),
        (plan(2, 3), ("dp_replicate", "dp_shard"), (2, 3)),
        (plan(2, 2, 4, 3), ("pp", "dp_replicate", "dp_shard", "tp"), (3, 2, 2, 4)),
    ],
)
def test_axes_are_the_degrees_above_one_from_the_least_to_the_most_talkative(asked, axes, sizes) -> None:
    assert layout(asked) == Layout(axes, sizes)
    assert layout(asked).ranks == asked.world_size


def test_shards_are_neighbours_and_copies_lie_apart() -> None:
    grid = layout(plan(2, 2))
    assert grid.groups("dp_shard") == ((0, 1), (2, 3))
    assert grid.groups("dp_replicate") == ((0, 2), (1, 3))
    assert grid.groups("dp_replicate", "dp_shard") == ((0, 1, 2, 3),)
    assert [data_rank(plan(2, 2), rank) for rank in range(4)] == [0, 1, 2, 3]


def test_every_share_of_the_data_goes_to_exactly_one_model_copy() -> None:
    """Ranks of one tensor and pipeline group see the same samples; each group another share."""
    asked = plan(2, 2, 2, 3)
    shares = [{data_rank(asked, rank) for rank in group} for group in layout(asked).groups("tp", "pp")]
    assert all(len(share) == 1 for share in shares)
    assert sorted(share for (share,) in shares) == list(range(asked.data_parallel))


def test_places_are_all_different() -> None:
    grid = layout(plan(2, 3, 2, 2))
    places = {tuple(grid.coordinate(rank).values()) for rank in range(grid.ranks)}
    assert len(places) == grid.ranks == 24
