"""Every optimizer over NCCL, with the kernels that a CPU does not have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.distributed import optimizer_claims
from tests.distributed.compare import workspace
from tests.distributed.optimizer_claims import Case
from tests.distributed.ranks import run_ranks
from tests.distributed.test_optimizers import CASES, ZERO_CASES
from tests.gpu.test_plans import on_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def on_cards(case: Case) -> Case:
    """In float32: bitsandbytes has no kernel for float64."""
    plans = {name: on_gpus(plan) for name, plan in case.plans.items()}
    return replace(case, precision="float32", plans=plans, within=1e-4)


@pytest.mark.parametrize("cases", [CASES, ZERO_CASES], ids=["torch", "deepspeed"])
def test_a_plan_changes_no_optimizer(cases: list[Case], tmp_path: Path) -> None:
    changes = {"train.finetuning_type": "full", "train.learning_rate": 0.003}
    root = workspace(tmp_path / "w", {"family": "llama", "tied": True}, **changes)
    run_ranks(2, optimizer_claims.same_and_resumed, str(root), [on_cards(case) for case in cases])
