"""Trials run real steps under torchrun, correct the planner and never end the stage when one fails."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tasks.contracts import Candidate, CostEstimate, Plan
from tasks.paths import Paths
from tasks.planner.cost import CostModel
from tasks.planner.machine import machine
from tasks.planner.model_spec import model_spec
from tasks.planner.workload import Workload
from tasks.select_strategy import select_strategy
from tasks.trainer.trial import TrialResult
from tasks.trials import by_measurement, learn, read_corrections, regime, try_plans
from tests.unit.planner_cases import cpu, manifest, params, train_params

pytestmark = pytest.mark.distributed

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
WORK = Workload(method="lora", precision="float32", sequence=48, mean_row=24)


def candidate(ranks: int, micro: int) -> Candidate:
    plan = Plan(
        engine="torch",
        device="cpu",
        backend="gloo",
        dp_replicate=ranks,
        dp_shard=1,
        tp=1,
        pp=1,
        schedule="none",
        micro_batch=micro,
        accumulation=2,
        activation_checkpointing="none",
        offload="none",
    )
    estimate = CostModel(model_spec(CONFIG), WORK, machine(cpu(2), "float32")).estimate(plan)
    return Candidate(plan=plan, estimate=estimate, rejected=None)


def test_a_trial_trains_real_steps_on_two_ranks_and_a_failing_one_is_told(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    broken = candidate(1, 1)
    broken = broken.model_copy(
        update={"plan": broken.plan.model_copy(update={"device": "cuda", "backend": "nccl"})}
    )
    results = try_plans(config, [candidate(2, 2), broken], train_params(), WORK, cpu(2), steps=2)
    assert results[0].failed is None
    assert 0 < results[0].seconds < 30
    assert results[1].seconds is None
    assert "ended with code" in results[1].failed


def result(seconds: float | None, of: Candidate) -> TrialResult:
    failed = None if seconds is not None else "ran out of GPU memory"
    return TrialResult(plan=of.plan, seconds=seconds, peak_bytes=None, failed=failed)


def test_measurement_chooses_and_a_failed_plan_is_rejected_with_its_reason() -> None:
    tried = [candidate(1, 1), candidate(1, 2), candidate(1, 4)]
    ranked, failed = by_measurement(
        tried, [result(2.0, tried[0]), result(1.0, tried[1]), result(None, tried[2])]
    )
    assert ranked == [tried[1], tried[0]]
    assert failed[0].rejected == "in a trial on this machine it ran out of GPU memory"


def test_what_a_trial_taught_corrects_the_next_estimate_and_is_remembered(
    monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ELASTANE_CACHE", str(tmp_path))
    hardware, tried = cpu(2), [candidate(1, 1), candidate(1, 2)]

    def predicted(of: Candidate) -> float:
        estimate: CostEstimate | None = of.estimate
        assert estimate is not None
        return estimate.total_seconds

    learn(hardware, WORK, tried, [result(3 * predicted(each), each) for each in tried])
    factors = read_corrections(hardware)
    assert factors[regime(WORK, tried[0].plan)] == pytest.approx(3)
    assert read_corrections(cpu(4)) == {}
    corrected = CostModel(
        model_spec(CONFIG), WORK, machine(hardware, "float32"), corrections=factors
    ).estimate(tried[0].plan)
    assert corrected.total_seconds == pytest.approx(3 * predicted(tried[0]))


def test_the_stage_tries_its_best_plans_and_chooses_by_measurement(
    monkeypatch, tmp_path: Path, capsys
) -> None:
    monkeypatch.setenv("ELASTANE_CACHE", str(tmp_path / "cache"))
    paths = Paths(tmp_path)
    cpu(2).write(paths.hardware)
    manifest(mean=24, longest=48).write(paths.manifest)
    paths.base.mkdir(parents=True)
    (paths.base / "config.json").write_text(json.dumps(CONFIG))
    report = select_strategy(params(select_strategy={"trials": 2}), paths)
    said = capsys.readouterr().err
    assert "trial 1: single" in said and "trial 2: single" in said
    first, second = report.chosen, report.runners_up[0]
    assert first.plan != second.plan
    seconds = [float(text) for text in re.findall(r"trial \d: .*: ([\d.e+-]+) s a step", said)]
    assert len(seconds) == 2
    tried = [int(text) for text in re.findall(r"trial \d: single, micro-batch (\d+): [\d.]+", said)]
    assert first.plan.micro_batch == tried[seconds.index(min(seconds))]
    assert read_corrections(cpu(2)).keys() == {"lora float32 none"}
