"""A checkpoint written under any plan goes on under any other: one run that changes its plan again and again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tasks.contracts import Plan, Precision
from tests import tiny
from tests.distributed.compare import assert_same, start_weights, workspace
from tests.distributed.ranks import train

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

PLANS = {
    "single": tiny.cpu_plan(1, 2, 4),
    "ddp2": tiny.cpu_plan(2, 2, 2),
    "fsdp4": tiny.cpu_plan(1, 1, 2, shards=4),
    "tp2": tiny.cpu_plan(1, 2, 4, tp=2, sequence_parallel=True),
    "pp2": tiny.cpu_plan(1, 2, 4, pp=2, schedule="1f1b"),
    "tp2pp2": tiny.cpu_plan(1, 2, 4, tp=2, pp=2, schedule="1f1b"),
}
STEPS_A_LEG = 2  # the wish to stop travels with the next step
QWEN = {"family": "qwen2", "tied": True}


def grand_tour(names: Sequence[str]) -> list[str]:
    """Visits that go from every plan to every other (and itself) exactly once: Hierholzer's circuit."""
    left = {name: list(names) for name in names}
    path, tour = [names[0]], []
    while path:
        onward = left[path[-1]]
        if onward:
            path.append(onward.pop())
        else:
            tour.append(path.pop())
    return tour[::-1]


def test_the_tour_has_every_ordered_pair() -> None:
    assert sorted(pairwise(grand_tour("abc"))) == sorted((a, b) for a in "abc" for b in "abc")


def travel(
    root: Path,
    visits: Sequence[Plan],
    precision: Precision = "float64",
    loss: float = 1e-9,
    moved: float = 1e-9,
) -> None:
    """Trains the workspace's recipe once without a stop and once changing plans; both are the same run."""
    whole = train(root, tiny.params(), visits[0], precision, run_key="whole")
    assert len(whole.records) >= STEPS_A_LEG * (len(visits) - 1)
    done = 0
    for number, plan in enumerate(visits[:-1]):
        part = train(
            root, tiny.params(), plan, precision, run_key="tour", stop_at=done + 1, fresh=number == 0
        ).records
        assert done < len(part) < len(whole.records)
        done = len(part)
    last = train(root, tiny.params(), visits[-1], precision, run_key="tour", fresh=False)
    assert_same(whole, last, start_weights(root), loss=loss, moved=moved)


def recipe(root: Path, method: str, epochs: int, model: Mapping[str, Any] = QWEN) -> Path:
    changes = {"train.finetuning_type": method, "train.num_train_epochs": epochs}
    if method == "full":
        changes["train.learning_rate"] = 0.003
    return workspace(root, dict(model), **changes)


@pytest.mark.parametrize(
    ("method", "visits"),
    [
        ("full", ["pp2", "fsdp4", "tp2pp2", "single", "tp2", "ddp2"]),
        pytest.param("lora", ["fsdp4", "tp2", "pp2", "ddp2", "tp2pp2", "single"], marks=pytest.mark.slow),
    ],
)
def test_a_run_is_the_same_through_every_plan(method: str, visits: list[str], tmp_path: Path) -> None:
    travel(recipe(tmp_path / "w", method, 3), [PLANS[name] for name in visits])


@pytest.mark.parametrize(
    ("method", "visits"),
    [
        ("full", ["tp2", "fsdp2", "tp2pp2"]),
        *(
            pytest.param(method, ["tp2", "fsdp2", "fsdp2tp2", "pp2", "tp2", "single"], marks=pytest.mark.slow)
            for method in ("full", "lora")
        ),
    ],
)
def test_a_piece_of_several_boxes_is_read_by_other_plans(
    method: str, visits: list[str], tmp_path: Path
) -> None:
    """glm's gate_up_proj is two matrices in one: under tensor parallelism a rank's part of it is two boxes."""
    plans = PLANS | {
        "fsdp2": tiny.cpu_plan(1, 2, 2, shards=2),
        "fsdp2tp2": tiny.cpu_plan(1, 2, 2, shards=2, tp=2),
    }
    travel(recipe(tmp_path / "w", method, 3, {"family": "glm"}), [plans[name] for name in visits])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_every_ordered_pair_of_plans(method: str, tmp_path: Path) -> None:
    visits = [PLANS[name] for name in grand_tour(list(PLANS))]
    travel(recipe(tmp_path / "w", method, 19), visits)
