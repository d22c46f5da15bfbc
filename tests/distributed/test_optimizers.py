"""Every optimizer learns under the plans it may run under what it learns in one plain process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiny
from tests.distributed import optimizer_claims
from tests.distributed.compare import workspace
from tests.distributed.optimizer_claims import Case
from tests.distributed.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

DDP = tiny.cpu_plan(2, 2, 2)
NATIVE = {
    "ddp2": DDP,
    "pp2": tiny.cpu_plan(1, 2, 4, pp=2, schedule="1f1b"),
    "fsdp2": tiny.cpu_plan(1, 2, 2, shards=2),
    "tp2": tiny.cpu_plan(1, 2, 4, tp=2),
}
WHOLE = {name: NATIVE[name] for name in ("ddp2", "pp2")}
ZERO = {
    name: tiny.cpu_plan(1, 2, 2).model_copy(update={"engine": "deepspeed", "dp_shard": 2, **changes})
    for name, changes in {
        "zero0": {"sharding": "zero0"},
        "zero1": {"sharding": "zero1"},
        "zero2": {"sharding": "zero2", "offload": "cpu"},
        "zero3": {"sharding": "zero3"},
    }.items()
}


CASES = [
    Case("lion", "float64", NATIVE, 1e-9),
    Case("adafactor", "float64", WHOLE, 1e-9),
    Case("adamw_8bit", "float32", WHOLE, 1e-5),
]
ZERO_CASES = [
    Case("lion", "float32", {"ddp2": DDP, **ZERO}, 1e-5),
    Case("adafactor", "float32", {"ddp2": DDP, "zero0": ZERO["zero0"]}, 1e-5),
    Case("adamw_8bit", "float32", {"ddp2": DDP, "zero0": ZERO["zero0"]}, 1e-5),
]


@pytest.mark.parametrize("cases", [CASES, ZERO_CASES], ids=["torch", "deepspeed"])
def test_a_plan_changes_no_optimizer(cases: list[Case], tmp_path: Path) -> None:
    if cases is ZERO_CASES:
        pytest.importorskip("deepspeed", reason="DeepSpeed is for Linux alone")
    changes = {"train.finetuning_type": "full", "train.learning_rate": 0.003}
    root = workspace(tmp_path / "w", {"family": "llama", "tied": True}, **changes)
    run_ranks(2, optimizer_claims.same_and_resumed, str(root), cases)
