"""FSDP2 over NCCL: what gloo cannot show, that is fused AdamW, kernels on lists of shards, and memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tasks.contracts import Plan, Precision
from tests import tiny
from tests.distributed.claims import agree_at_the_first_step, hold_half, skip_together
from tests.distributed.compare import workspace
from tests.distributed.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def on_gpus(plan: Plan) -> Plan:
    return plan.model_copy(update={"device": "cuda", "backend": "nccl"})


DDP2, FSDP2 = on_gpus(tiny.cpu_plan(2, 2, 2)), on_gpus(tiny.cpu_plan(1, 2, 2, shards=2))


@pytest.fixture(scope="module", params=["lora", "full"])
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"train.finetuning_type": request.param}
    return workspace(tmp_path_factory.mktemp(request.param) / "w", **changes)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_the_first_step_is_that_of_ddp(root: Path, precision: Precision) -> None:
    run_ranks(2, agree_at_the_first_step, str(root), DDP2, FSDP2, precision)


def test_a_rank_holds_half(root: Path) -> None:
    run_ranks(2, hold_half, str(root), FSDP2)


def test_an_overflow_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
    run_ranks(2, skip_together, str(workspace(tmp_path / "w")), FSDP2)
