"""The clock on CUDA events: kinds add up to wall time, a slow rank is waited for, the queue tells who is the brake."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tasks.contracts import Plan
from tasks.trainer.bottleneck import NEVER_BEHIND
from tasks.trainer.clock import KINDS, QUEUED, StepClock
from tests.distributed.claims import _engine, _join, _share
from tests.distributed.compare import workspace
from tests.distributed.ranks import run_ranks
from tests.gpu.test_fsdp import DDP2, FSDP2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS = 5
SPIN = 400_000_000  # clock cycles of a GPU: some 0.2 s
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


def _wait(root: str, plan: Plan) -> None:
    _join(plan)
    engine = _engine(root, plan, "bfloat16")
    if dist.get_rank() == 1:
        norm = next(part for name, part in engine.model.named_modules() if name.endswith("model.norm"))
        norm.register_forward_pre_hook(lambda *_: torch.cuda._sleep(SPIN))
    batches, targets = _share(0)
    for _ in range(2):
        engine.train_step(batches, targets, ())
    torch.cuda.synchronize()
    before, begin = engine.clock(), time.perf_counter()
    for _ in range(STEPS):
        engine.train_step(batches, targets, ())
    torch.cuda.synchronize()
    wall = time.perf_counter() - begin
    took = {kind: seconds - before[kind] for kind, seconds in engine.clock().items()}
    assert abs(sum(took[kind] for kind in KINDS) - wall) <= 0.05 * wall, (took, wall)
    waits = "communication" if dist.get_rank() == 0 else "forward"
    assert took[waits] > 0.6 * wall, (took, wall)


@two
@pytest.mark.parametrize("plan", [DDP2, FSDP2], ids=lambda plan: plan.name)
def test_waiting_for_a_slow_rank_is_communication(tmp_path: Path, plan: Plan) -> None:
    run_ranks(2, _wait, str(workspace(tmp_path / "w")), plan)
