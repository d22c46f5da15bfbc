"""Where a step's time goes, on real ranks: nothing is lost, and a slow rank's peers are seen to wait for it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tasks.contracts import Plan, TrainPerformance
from tasks.params import read_params
from tasks.paths import Paths
from tests import tiny
from tests.distributed.compare import ROWS
from tests.distributed.ranks import _train_rank, run_ranks, train

pytestmark = pytest.mark.distributed

SINGLE = tiny.cpu_plan(1, 2, 2)
DDP2 = tiny.cpu_plan(2, 2, 2)
FSDP2 = tiny.cpu_plan(1, 2, 2, shards=2)
TP2 = tiny.cpu_plan(1, 2, 2, tp=2)
PP2 = tiny.cpu_plan(1, 2, 2, pp=2, schedule="1f1b")
MICRO_BATCHES, ROWS_EACH, TOKENS = 2, 2, 8
STEPS = 3
NAP = 0.3
CYCLES = 500_000_000  # of a GPU's clock: about as long


def kinds_add_up(root: str, plan: Plan, slow: int | None) -> None:
    """Trains a few steps; on rank `slow` the second decoder layer takes a nap in every forward pass."""
    from tasks.trainer.clock import KINDS
    from tasks.trainer.engine import Batch
    from tasks.trainer.loading import open_base
    from tasks.trainer.torch_engine import TorchEngine

    cuda = plan.device == "cuda"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    params = read_params(Path(root) / "params.yaml")
    base = open_base(Paths(Path(root)), torch.float32)
    napping = base.model.get_decoder().layers[1]  # the second of two stages holds it, too
    engine = TorchEngine(base, params.train, plan, "float32", 10, params.seed)
    nap, seconds = _nap_of(cuda)
    if slow == dist.get_rank():
        napping.register_forward_pre_hook(lambda *_: nap())
    rows = torch.randint(3, 259, (MICRO_BATCHES, ROWS_EACH, TOKENS))
    batches = [Batch(ids, ids) for ids in rows]
    targets = plan.data_parallel * MICRO_BATCHES * ROWS_EACH * (TOKENS - 1)
    engine.train_step(batches, targets, ())
    _meet(cuda)
    before, begin = engine.clock(), time.perf_counter()
    for _ in range(STEPS):
        engine.train_step(batches, targets, ())
    wall = time.perf_counter() - begin
    _meet(cuda)
    took = {kind: spent - before[kind] for kind, spent in engine.clock().items()}
    assert abs(sum(took[kind] for kind in KINDS) - wall) <= 0.03 * wall, (took, wall)
    assert min(took["forward"], took["backward"], took["optimizer"]) > 0, took
    napped = STEPS * MICRO_BATCHES * seconds
    if slow == dist.get_rank():
        assert took["forward"] >= 0.98 * napped, took
    elif slow is not None:
        waits = "communication" if plan.pp == 1 else "pipeline_wait"
        assert took[waits] >= 0.8 * napped, took
        assert took["forward"] + took["backward"] < 0.8 * napped, took


def _nap_of(cuda: bool) -> tuple[Callable[[], None], float]:
    """A nap of the host, or of the device while the host goes on; and its seconds."""
    if not cuda:
        return lambda: time.sleep(NAP), NAP
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    torch.cuda._sleep(CYCLES)
    torch.cuda.synchronize()
    return lambda: torch.cuda._sleep(CYCLES), time.perf_counter() - begin


def _meet(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()
    dist.barrier()


@pytest.mark.parametrize("plan", [SINGLE, DDP2, FSDP2, TP2, PP2], ids=lambda plan: plan.name)
def test_the_kinds_add_up_to_the_steps_wall_time(lora: Path, plan: Plan) -> None:
    run_ranks(plan.world_size, kinds_add_up, str(lora), plan, None)


@pytest.mark.parametrize("plan", [DDP2, FSDP2, TP2, PP2], ids=lambda plan: plan.name)
def test_waiting_for_a_slow_rank_is_not_taken_for_computing(lora: Path, plan: Plan) -> None:
    run_ranks(2, kinds_add_up, str(lora), plan, 1)


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
