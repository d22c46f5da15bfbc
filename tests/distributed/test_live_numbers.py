"""Where a step's time goes, on real ranks: nothing is lost, and a slow rank's peers are seen to wait for it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tasks.contracts import Plan, TrainPerformance
from tests import tiny
from tests.distributed.claims import _engine, _join, _share
from tests.distributed.compare import ROWS
from tests.distributed.ranks import _train_rank, run_ranks, train

pytestmark = pytest.mark.distributed

SINGLE = tiny.cpu_plan(1, 2, 2)
DDP2 = tiny.cpu_plan(2, 2, 2)
FSDP2 = tiny.cpu_plan(1, 2, 2, shards=2)
PLANS = (SINGLE, DDP2, FSDP2)
STEPS = 3
NAP = 0.3


def _seconds(root: str, plan: Plan, slow: int | None) -> None:
    """Trains a few steps; on rank `slow` every forward pass takes a nap longer."""
    from tasks.trainer.clock import KINDS

    _join(plan)
    engine = _engine(root, plan, "float32")
    if slow == dist.get_rank():
        # Not in a layer: those are computed again in the backward pass.
        norm = next(part for name, part in engine.model.named_modules() if name.endswith("model.norm"))
        norm.register_forward_pre_hook(lambda *_: time.sleep(NAP))
    batches, targets = _share(0)
    engine.train_step(batches, targets, ())
    before, begin = engine.clock(), time.perf_counter()
    for _ in range(STEPS):
        engine.train_step(batches, targets, ())
    wall = time.perf_counter() - begin
    took = {kind: seconds - before[kind] for kind, seconds in engine.clock().items()}
    assert abs(sum(took[kind] for kind in KINDS) - wall) <= 0.03 * wall, (took, wall)
    assert min(took["forward"], took["backward"], took["optimizer"]) > 0, took
    napped = STEPS * len(batches) * NAP
    if slow == dist.get_rank():
        assert took["forward"] >= napped, took
    elif slow is not None:
        assert took["communication"] >= 0.8 * napped, took
        assert took["forward"] + took["backward"] < 0.8 * napped, took


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_the_kinds_add_up_to_the_steps_wall_time(lora: Path, plan: Plan) -> None:
    run_ranks(plan.world_size, _seconds, str(lora), plan, None)


@pytest.mark.parametrize("plan", [DDP2, FSDP2], ids=lambda plan: plan.name)
def test_waiting_for_a_slow_rank_is_communication_and_no_computing(lora: Path, plan: Plan) -> None:
    run_ranks(2, _seconds, str(lora), plan, 1)


def _train_and_tell(root: str, run_key: str, stop_at: int | None) -> None:
    from tasks.trainer import live

    live.WRITE_SECONDS = 0.0
    _train_rank(root, run_key, stop_at)


def test_a_run_writes_its_figures_as_it_goes_and_its_report_in_the_end(
    lora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.distributed.ranks._train_rank", _train_and_tell)
    whole = train(lora, tiny.params(), DDP2, run_key="live")
    steps = 2 * -(-ROWS // 8)
    for rank in range(2):
        said = json.loads((whole.run / "ranks" / f"{rank}.json").read_text())
        assert (said["rank"], said["step"]) == (rank, steps)
        assert sum(said["shares"].values()) == pytest.approx(1)
        assert said["peak_memory_bytes"] > 1 << 20
    report = TrainPerformance.read(whole.run / "finished" / "train_performance.json")
    assert report.steps_timed == steps and report.tokens_per_second > 0
    assert report.mfu is None and report.bottleneck and report.advice
    for rank in report.ranks:
        assert sum(rank.shares.values()) == pytest.approx(1)
        assert min(rank.forward, rank.backward, rank.optimizer, rank.communication, rank.checkpoint) > 0
