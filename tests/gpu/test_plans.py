"""Plans over NCCL: what gloo cannot show, that is fused AdamW, kernels on lists of shards, and memory."""

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
def test_the_first_step_is_that_of_ddp(root: Path, precision: Precision, tmp_path: Path) -> None:
    run_ranks(2, agree_at_the_first_step, str(root), DDP2, FSDP2, precision, str(tmp_path))


TP2 = on_gpus(tiny.cpu_plan(1, 2, 4, tp=2))
SP2 = on_gpus(tiny.cpu_plan(1, 2, 4, tp=2, sequence_parallel=True))
PP2 = on_gpus(tiny.cpu_plan(1, 2, 4, pp=2, schedule="1f1b"))
# Partial sums are rounded to 8 (bfloat16) or 11 bits before they are added up: that is what differs, not the sums.
CUT = {"float32": (1e-6, 2e-5), "bfloat16": (2e-3, 8e-2), "float16": (2e-4, 1e-2)}


@pytest.mark.parametrize("plan", [TP2, SP2, PP2], ids=lambda plan: plan.name)
@pytest.mark.parametrize("precision", list(CUT))
def test_the_first_step_of_a_cut_model(root: Path, plan: Plan, precision: Precision, tmp_path: Path) -> None:
    run_ranks(2, agree_at_the_first_step, str(root), DDP2, plan, precision, str(tmp_path), *CUT[precision])


@pytest.mark.parametrize("plan", [TP2, PP2], ids=lambda plan: plan.name)
def test_an_overflow_in_a_cut_model_skips_the_step_on_all(tmp_path: Path, plan: Plan) -> None:
    run_ranks(2, skip_together, str(workspace(tmp_path / "w")), plan)


def test_schedules_over_nccl(tmp_path: Path) -> None:
    root = workspace(tmp_path / "w", {"layers": 4}, **{"train.finetuning_type": "full"})
    for schedule, chunks in (("gpipe", 1), ("interleaved1f1b", 2), ("zerobubble", 2)):
        plan = on_gpus(tiny.cpu_plan(1, 2, 4, pp=2, schedule=schedule, virtual_stages=chunks))
        run_ranks(
            2, agree_at_the_first_step, str(root), DDP2, plan, "float32", str(tmp_path / schedule), 1e-6, 2e-5
        )


def test_a_rank_holds_half(root: Path) -> None:
    run_ranks(2, hold_half, str(root), FSDP2)


def test_an_overflow_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
    run_ranks(2, skip_together, str(workspace(tmp_path / "w")), FSDP2)
