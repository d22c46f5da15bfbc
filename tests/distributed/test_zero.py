"""The engine deepspeed learns what the native one learns, and each reads the other's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.contracts import Plan
from tasks.select_strategy import can_build_async_io
from tests import tiny
from tests.distributed import zero_claims
from tests.distributed.compare import workspace
from tests.distributed.ranks import run_ranks
from tests.distributed.test_resume_plans import recipe, travel

pytest.importorskip("deepspeed", reason="DeepSpeed is for Linux alone")
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

NATIVE = tiny.cpu_plan(2, 2, 2)


def zero(sharding: str, ranks: int = 2, accumulation: int = 2, **more: Any) -> Plan:
    changes = {"engine": "deepspeed", "dp_shard": ranks, "sharding": sharding, **more}
    return tiny.cpu_plan(1, 2, accumulation).model_copy(update=changes)


EVERY = [
    zero("zero0"),
    zero("zero1"),
    zero("zero2"),
    zero("zero3"),
    zero("zero2", offload="cpu"),
    zero("zero3", offload="cpu"),
    zero("zero3", offload="cpu", offload_parameters="cpu"),
    zero("zero3", activation_checkpointing="full"),
]


@pytest.mark.slow
@pytest.mark.skipif(
    not can_build_async_io(), reason="DeepSpeed's op for NVMe needs libaio and a C++ compiler"
)
def test_states_on_nvme(tmp_path: Path) -> None:
    """Of a model large enough that DeepSpeed swaps at all (a MiB a rank)."""
    changes = {"train.finetuning_type": "full", "train.num_train_epochs": 1, "train.learning_rate": 0.001}
    root = workspace(tmp_path / "w", {"hidden": 256, "layers": 4}, **changes)
    run_ranks(
        2, zero_claims.same_and_resumed, str(root), NATIVE, [zero("zero3", offload="nvme")], "float32", 1e-5
    )
    assert list((root / "nvme").rglob("*.swp"))


LONG_WAY = ["zero2cpu", "zero3dp4", "tp2", "zero3dp1", "zero1", "ddp2", "zero3dp2", "pp2", "zero0"]


@pytest.mark.parametrize("method", ["full", pytest.param("lora", marks=pytest.mark.slow)])
def test_every_stage_is_the_native_engine(method: str, tmp_path: Path) -> None:
    root = recipe(tmp_path / "w", method, 1)
    run_ranks(2, zero_claims.same_and_resumed, str(root), NATIVE, EVERY, "float32", 1e-5)


def test_adapters_under_zero3_and_offload(tmp_path: Path) -> None:
    root = recipe(tmp_path / "w", "lora", 1)
    plans = [zero("zero3"), zero("zero2", offload="cpu")]
    run_ranks(2, zero_claims.same_and_resumed, str(root), NATIVE, plans, "float32", 1e-5)


def test_an_overflow_is_skipped_by_all(tmp_path: Path) -> None:
    root = workspace(tmp_path / "w", {"family": "llama"}, **{"train.finetuning_type": "full"})
    run_ranks(2, zero_claims.skip_together, str(root), [zero("zero0"), zero("zero2"), zero("zero3")])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_half_precision_rounds_as_the_native_engine(method: str, tmp_path: Path) -> None:
    """The frozen base of LoRA in bfloat16 beside adapters in float32, too."""
    root = recipe(tmp_path / "w", method, 1)
    plans = [zero("zero1"), zero("zero3")]
    # Six steps of AdamW draw rounding out: float32 differs from bfloat16 by as much.
    run_ranks(2, zero_claims.same_and_resumed, str(root), NATIVE, plans, "bfloat16", 2e-2)


@pytest.mark.parametrize(
    ("method", "visits"),
    [
        ("full", ["zero3dp2", "fsdp2", "zero2dp4", "single"]),
        *(pytest.param(method, LONG_WAY, marks=pytest.mark.slow) for method in ("full", "lora")),
    ],
)
def test_a_run_goes_through_both_engines(method: str, visits: list[str], tmp_path: Path) -> None:
    """Other world sizes, too; what is exported at the end is the same."""
    plans = {
        "single": tiny.cpu_plan(1, 2, 4),
        "ddp2": tiny.cpu_plan(2, 2, 2),
        "fsdp2": tiny.cpu_plan(1, 2, 2, shards=2),
        "tp2": tiny.cpu_plan(1, 2, 4, tp=2),
        "pp2": tiny.cpu_plan(1, 2, 4, pp=2, schedule="1f1b"),
        "zero0": zero("zero0"),
        "zero1": zero("zero1"),
        "zero2cpu": zero("zero2", offload="cpu"),
        "zero2dp4": zero("zero2", 4, 1),
        "zero3dp1": zero("zero3", 1, 4, offload="cpu", offload_parameters="cpu"),
        "zero3dp2": zero("zero3"),
        "zero3dp4": zero("zero3", 4, 1),
    }
    legs, loss = (2, 2e-5) if len(visits) < 5 else (5, 2e-4)
    travel(recipe(tmp_path / "w", method, legs), [plans[name] for name in visits], "float32", loss, 5e-3)
