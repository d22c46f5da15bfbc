"""FSDP2 and its hybrid with copies train what one process trains, and their checkpoints go into any other plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.contracts import Plan
from tests import tiny
from tests.distributed.claims import agree_at_the_first_step, hold_half, skip_together
from tests.distributed.compare import assert_same, start_weights, weights, workspace
from tests.distributed.ranks import Trained, run_ranks, train

pytestmark = pytest.mark.distributed

SINGLE = tiny.cpu_plan(1, 2, 4)
DDP2 = tiny.cpu_plan(2, 2, 2)
FSDP2 = tiny.cpu_plan(1, 2, 2, shards=2)
HYBRID = tiny.cpu_plan(2, 1, 2, shards=2)  # on the short last step two of its four ranks have no sample


def recomputing(plan: Plan) -> Plan:
    return plan.model_copy(update={"activation_checkpointing": "full"})


@pytest.mark.parametrize("plan", [FSDP2, recomputing(HYBRID)], ids=lambda plan: plan.name)
def test_lora_equals_single(lora: Path, lora_single: Trained, plan: Plan) -> None:
    assert_same(lora_single, train(lora, tiny.params(), plan, run_key=plan.name), start_weights(lora))


@pytest.mark.parametrize("plan", [recomputing(FSDP2), HYBRID], ids=lambda plan: plan.name)
def test_full_equals_single(full: Path, full_single: Trained, plan: Plan) -> None:
    assert_same(full_single, train(full, tiny.params(), plan, run_key=plan.name), start_weights(full))


CHAINS = {"full": [DDP2, FSDP2, SINGLE, HYBRID], "lora": [SINGLE, FSDP2, DDP2, HYBRID]}


@pytest.mark.parametrize("method", list(CHAINS))
def test_a_run_goes_from_plan_to_plan(method: str, request: pytest.FixtureRequest) -> None:
    """Stopped three times and taken up under another plan, a run is the one that was never stopped."""
    root, uninterrupted = request.getfixturevalue(method), request.getfixturevalue(f"{method}_single")
    *stopped, last = CHAINS[method]
    done = 0
    for number, plan in enumerate(stopped):
        part = train(
            root, tiny.params(), plan, run_key="chain", stop_at=1 + 2 * number, fresh=not number
        ).records
        assert done < len(part) < len(uninterrupted.records)
        done = len(part)
    assert_same(
        uninterrupted, train(root, tiny.params(), last, run_key="chain", fresh=False), start_weights(root)
    )


def test_tied_tables_stay_one_under_shards(tmp_path: Path) -> None:
    """Qwen2's biases and a head that is the embedding: equal to one process, and exported once."""
    root = workspace(
        tmp_path / "w",
        {"family": "qwen2", "tied": True},
        **{"train.finetuning_type": "full", "train.learning_rate": 0.003, "train.num_train_epochs": 1},
    )
    one = train(root, tiny.params(), SINGLE, run_key="one")
    other = train(root, tiny.params(), recomputing(FSDP2), run_key="other")
    assert_same(one, other, start_weights(root))
    assert "lm_head.weight" not in weights(other)
    assert one.report.total_parameters == other.report.total_parameters


@pytest.mark.parametrize(
    ("method", "model", "plans"),
    [
        ("lora", {}, (DDP2, FSDP2)),
        ("full", {}, (tiny.cpu_plan(4), HYBRID)),
        ("full", {"family": "qwen2", "tied": True}, (DDP2, FSDP2)),  # biases are cast with their matrices
        ("full", {"family": "qwen3"}, (DDP2, FSDP2)),  # norms inside attention stay float32
    ],
    ids=["lora", "hybrid", "qwen2-tied", "qwen3"],
)
def test_bfloat16_rounds_as_under_ddp(
    tmp_path: Path, method: str, model: dict[str, Any], plans: tuple[Plan, Plan]
) -> None:
    root = workspace(tmp_path / "w", model, **{"train.finetuning_type": method})
    run_ranks(plans[0].world_size, agree_at_the_first_step, str(root), *plans, "bfloat16", str(tmp_path))


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_rank_holds_its_shards_alone_and_frozen_weights_have_no_gradient(
    method: str, request: pytest.FixtureRequest
) -> None:
    run_ranks(2, hold_half, str(request.getfixturevalue(method)), FSDP2)


def test_an_overflow_on_one_rank_skips_the_step_on_all(lora: Path) -> None:
    run_ranks(2, skip_together, str(lora), FSDP2)
