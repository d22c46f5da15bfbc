"""The clock on CUDA events: kinds add up to wall time, a slow rank is waited for, the queue tells who is the brake."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from tasks.contracts import Plan
from tasks.trainer.bottleneck import NEVER_BEHIND
from tasks.trainer.clock import KINDS, QUEUED, StepClock
from tests.distributed.compare import workspace
from tests.distributed.ranks import run_ranks
from tests.distributed.test_live_numbers import DDP2, FSDP2, PP2, TP2, kinds_add_up

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS = 5
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def _shares(layers: int, width: int, rows: int) -> dict[str, float]:
    net = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers))).cuda().bfloat16()
    inputs = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    clock = StepClock(net, True)
    for step in range(STEPS):
        if step == 1:
            before, begin = clock.totals, time.perf_counter()
        clock.start()
        loss = net(inputs).float().square().mean()
        loss.backward()
        clock.reduced()
        loss.item()
        torch.cuda.synchronize()
        clock.stop()
    torch.cuda.synchronize()
    wall = time.perf_counter() - begin
    took = {kind: seconds - before[kind] for kind, seconds in clock.totals.items()}
    assert sum(took[kind] for kind in KINDS) == pytest.approx(wall, rel=0.05)
    return {kind: seconds / wall for kind, seconds in took.items()}


def test_the_queue_tells_whether_the_device_or_the_host_is_the_brake() -> None:
    large, small = _shares(8, 8192, 16384), _shares(300, 64, 16)
    assert large[QUEUED] > 5 * NEVER_BEHIND, large
    assert small[QUEUED] < NEVER_BEHIND, small
    assert 1.5 < large["backward"] / large["forward"] < 2.6, large


@two
@pytest.mark.parametrize("plan", [DDP2, FSDP2, TP2, PP2], ids=lambda plan: plan.name)
def test_waiting_for_a_slow_rank_is_not_taken_for_computing(tmp_path: Path, plan: Plan) -> None:
    on_gpus = plan.model_copy(update={"device": "cuda", "backend": "nccl"})
    run_ranks(2, kinds_add_up, str(workspace(tmp_path / "w")), on_gpus, 1)
