"""What a run's report and its live figures are made of: shares, MFU beside the planner's, and the bottleneck."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.contracts import Candidate, Plan, PlanReport, Precision, RankPerformance, Resolved
from tasks.paths import Paths
from tasks.planner.cost import CostModel
from tasks.planner.machine import machine
from tasks.planner.workload import Workload
from tasks.trainer import live
from tasks.trainer.bottleneck import bottleneck
from tasks.trainer.live import Board, Reporter
from tasks.trainer.performance import Stopwatch, Yardstick, predicted, rank_performance, shares
from tests import tiny
from tests.unit.planner_cases import SMOL, cpu, gpus

CONFIG = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
CLOCK = {
    "forward": 10.0,
    "backward": 20.0,
    "communication": 5.0,
    "pipeline_wait": 2.0,
    "optimizer": 3.0,
    "queued": 8.0,
}


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    found = Paths(tmp_path)
    found.base.mkdir(parents=True)
    (found.base / "config.json").write_text(json.dumps(CONFIG))
    return found


def on_gpus(plan: Plan) -> Plan:
    return plan.model_copy(update={"device": "cuda", "backend": "nccl"})


# --- shares -------------------------------------------------------------------------------------


def spent(wall: float) -> dict[str, float]:
    return {**CLOCK, "data_wait": 4.0, "checkpoint": 6.0, "wall": wall}


def test_shares_of_wall_time_sum_to_one_and_the_rest_is_idle() -> None:
    found = shares(spent(100.0))
    assert found == pytest.approx(
        {
            "data_wait": 0.04,
            "forward": 0.1,
            "backward": 0.2,
            "communication": 0.05,
            "pipeline_wait": 0.02,
            "optimizer": 0.03,
            "checkpoint": 0.06,
            "idle": 0.5,
        }
    )
    assert sum(shares(spent(49.0)).values()) == pytest.approx(1), "clocks that disagree by a hair"


def test_a_rank_reports_its_steps_and_on_a_cpu_no_queue() -> None:
    watch = Stopwatch()
    watch.steps = 7
    watch.start -= 100.0
    on_cpu = rank_performance(1, tiny.cpu_plan(2), watch, CLOCK, None)
    assert (on_cpu.rank, on_cpu.steps, on_cpu.queued) == (1, 7, None)
    assert on_cpu.peak_memory_bytes > 1 << 20
    assert sum(on_cpu.shares.values()) == pytest.approx(1)
    assert on_cpu.forward == pytest.approx(0.1, rel=0.01)


# --- MFU and what was predicted -----------------------------------------------------------------


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_mfu_is_the_planners(paths: Paths, method: str, precision: Precision) -> None:
    """A run as fast as predicted, on rows of the predicted length, has the predicted MFU."""
    hardware, plan = gpus(2), on_gpus(tiny.cpu_plan(2, 4, 2))
    work = Workload(method=method, precision=precision, sequence=300, mean_row=300.0)
    estimate = CostModel(SMOL, work, machine(hardware, precision)).estimate(plan)
    yardstick = Yardstick(paths, hardware, plan, precision, method)
    flops = yardstick.flops([300] * plan.global_batch)
    assert yardstick.mfu(flops, estimate.total_seconds) == pytest.approx(estimate.mfu, rel=1e-12)
    uneven = yardstick.flops([100, 500] * (plan.global_batch // 2))
    assert uneven > flops, "attention grows with the square of a row"


def test_without_a_data_sheet_or_a_known_family_there_is_no_mfu(paths: Paths) -> None:
    plan, rows = on_gpus(tiny.cpu_plan()), [300]
    on_cpu = Yardstick(paths, cpu(2), tiny.cpu_plan(), "float32", "lora")
    unknown = Yardstick(paths, gpus(1, "Some card"), plan, "bfloat16", "lora")
    assert on_cpu.mfu(on_cpu.flops(rows), 1.0) is unknown.mfu(unknown.flops(rows), 1.0) is None
    (paths.base / "config.json").write_text(json.dumps({**CONFIG, "model_type": "unheard-of"}))
    foreign = Yardstick(paths, gpus(1), plan, "bfloat16", "lora")
    assert foreign.mfu(foreign.flops(rows), 1.0) is None


def test_the_prediction_is_that_of_the_plan_that_ran_or_none(paths: Paths) -> None:
    plan = tiny.cpu_plan(2)
    assert predicted(paths, plan) is None, "no plan.json"
    work = Workload(method="lora", precision="float32", sequence=100, mean_row=50.0)
    estimate = CostModel(SMOL, work, machine(cpu(2), "float32")).estimate(plan)
    PlanReport(
        chosen=Candidate(plan=plan, estimate=estimate, rejected=None),
        why="",
        runners_up=(),
        rejected=(),
        resolved=Resolved(precision="float32", token_budget=None),
        model=SMOL,
    ).write(paths.plan)
    found = predicted(paths, plan)
    assert found is not None
    assert found.tokens_per_second == estimate.tokens_per_second
    assert found.peak_memory_bytes >= estimate.total_bytes
    assert predicted(paths, tiny.cpu_plan(2, 4)) is None


# --- live ---------------------------------------------------------------------------------------


class Engine:
    """What a reporter asks of an engine."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(CLOCK, 0.0)

    def clock(self) -> dict[str, float]:
        return dict(self.seconds)


def test_rank_0_reads_what_every_rank_of_this_start_has_written(
    paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "WRITE_SECONDS", 0.0)
    plan = tiny.cpu_plan(2)
    folder = tmp_path / "ranks"
    folder.mkdir()
    stale = live.LiveRank(
        rank=1, step=9, written=1.0, shares={}, peak_memory_bytes=1 << 50, gpu_utilisation_percent=None
    )
    stale.write(folder / "1.json")
    (folder / "0.json").write_text("half a fi")
    board = Board(tmp_path, plan, Yardstick(paths, cpu(2), plan, "float32", "lora"))
    board.step([100, 50], 0.5)
    board.read()
    assert board.text(1.25) == "loss 1.250, 300 tokens/s"
    assert board.metrics() == {"tokens_per_second": 300}
    for rank in (0, 1):
        watch, engine = Stopwatch(), Engine()
        reporter = Reporter(tmp_path, rank, plan, engine, watch)
        watch.start -= 10.0
        engine.seconds |= {"communication": 6.0 * rank, "forward": 10.0 - 6.0 * rank}
        assert reporter.step(1)
    board.read()
    assert "GiB (rank " in board.text(1.25) and "communication 60%" in board.text(1.25)
    told = board.metrics()
    assert told["time_share/communication"] == pytest.approx(0.3, abs=0.01)
    assert {"peak_memory_gib/rank_0", "peak_memory_gib/rank_1"} <= told.keys() and "mfu" not in told
    assert board.metrics() == {"tokens_per_second": 300}, "the rest at a bounded rate"


def test_a_report_is_of_the_time_since_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, engine = Stopwatch(), Engine()
    reporter = Reporter(tmp_path, 0, tiny.cpu_plan(), engine, watch)
    assert not reporter.step(1), "not before its time"
    monkeypatch.setattr(live, "WRITE_SECONDS", 0.0)
    reporter = Reporter(tmp_path, 0, tiny.cpu_plan(), engine, watch)
    for kind in ("forward", "backward"):
        watch.start -= 10.0
        engine.seconds[kind] = 10.0
        assert reporter.step(1)
        file = live.LiveRank.model_validate_json((tmp_path / "ranks" / "0.json").read_text())
        assert file.shares[kind] == pytest.approx(1, abs=0.01)


def test_speed_is_of_the_last_seconds(paths: Paths, tmp_path: Path) -> None:
    plan, hardware = on_gpus(tiny.cpu_plan()), gpus(1)
    yardstick = Yardstick(paths, hardware, plan, "bfloat16", "lora")
    board = Board(tmp_path, plan, yardstick)
    board.step([1000], 100.0)  # compiling, say
    for _ in range(40):
        board.step([1000], 1.0)
    assert board.rate == pytest.approx(1000)
    assert board.mfu == pytest.approx(yardstick.mfu(yardstick.flops([1000]), 1.0))
    assert f"MFU {board.mfu:.0%}" in board.text(1.0)


# --- the bottleneck -----------------------------------------------------------------------------


def rank(number: int = 0, queued: float | None = None, gib: int = 1, **values: float) -> RankPerformance:
    kinds = ("data_wait", "forward", "communication", "pipeline_wait", "optimizer", "checkpoint", "idle")
    said = dict.fromkeys(kinds, 0.0) | values
    return RankPerformance(
        rank=number,
        steps=10,
        backward=1 - sum(said.values()),
        queued=queued,
        gpu_utilisation_percent=None,
        peak_memory_bytes=gib << 30,
        peak_memory_kind="process_rss",
        **said,
    )


CPU, GPU = tiny.cpu_plan(), on_gpus(tiny.cpu_plan())
CUT = CPU.model_copy(update={"tp": 2})
PIPELINE = CPU.model_copy(update={"pp": 2, "schedule": "1f1b"})
SHARDED = on_gpus(tiny.cpu_plan(1, 2, 2, shards=2))
ONE_FOR_ALL = on_gpus(tiny.cpu_plan(2)).model_copy(update={"replication": "data_parallel"})


@pytest.mark.parametrize(
    ("ranks", "plan", "name", "way"),
    [
        ([rank(data_wait=0.3, checkpoint=0.2)], CPU, "waiting for data", "faster disk"),
        ([rank(checkpoint=0.3, data_wait=0.2)], CPU, "saving checkpoints", "checkpoint_every_seconds"),
        ([rank(0, communication=0.4), rank(1)], CPU, "slow rank", "slower one, rank 1"),
        (
            [rank(0, communication=0.3), rank(1, communication=0.3)],
            CPU,
            "exposed communication",
            "global_batch",
        ),
        (
            [rank(0, communication=0.3), rank(1, communication=0.3)],
            CUT,
            "exposed communication",
            "tensor_parallel",
        ),
        (
            [rank(0, communication=0.3), rank(1, communication=0.3)],
            SHARDED,
            "exposed communication",
            "gathers",
        ),
        (
            [rank(0, pipeline_wait=0.4), rank(1, pipeline_wait=0.2, communication=0.12)],
            PIPELINE,
            "pipeline bubble",
            "30% of the time, with 2 micro-batches over 2 stages",
        ),
        ([rank(idle=0.5)], CPU, "host", "between steps"),
        ([rank()], CPU, "computing", "a GPU is the only large gain"),
        ([rank(queued=0.01, gib=60)], GPU, "launching kernels", "select_strategy.compile"),
        (
            [rank(queued=0.4, gib=10)],
            GPU,
            "small micro-batches",
            "12% of the device memory is used (MFU 41%)",
        ),
        ([rank(queued=0.4, gib=70)], GPU, "computing", "more or faster GPUs"),
        (
            [rank(queued=0.01, gib=60)],
            ONE_FOR_ALL,
            "one process for all GPUs",
            "replication=ddp learns the same",
        ),
    ],
)
def test_the_largest_loss_of_time_is_named_with_a_way_out(
    ranks: list[RankPerformance], plan: Plan, name: str, way: str
) -> None:
    found = bottleneck(ranks, plan, 80 << 30, 0.41)
    assert found.name == name
    assert way in found.advice
