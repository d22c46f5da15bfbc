"""Names of plans: what they mean, and when there is no such plan for a recipe and machine."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.commands.certify_names import NotRun, parse_name, plan_for
from tasks.contracts import HardwareProfile, Plan
from tasks.errors import UserError
from tasks.planner.model_spec import model_spec
from tests.unit.planner_cases import cpu, gpus, problem, strategy_params, train_params

SPEC = model_spec(
    {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 256,
    }
)


def planned(
    name: str, batch: int = 8, method: str = "full", hardware: HardwareProfile | None = None
) -> Plan | NotRun:
    train = train_params(global_batch=batch, finetuning_type=method)
    asked = problem(hardware or cpu(2), SPEC, train, strategy_params(), precision="float32")
    return plan_for(parse_name(name), asked, "float32")


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("single", {"world_size": 1}),
        ("ddp2", {"dp_replicate": 2, "sharding": "none"}),
        ("fsdp4", {"dp_shard": 4, "sharding": "fsdp2"}),
        ("dp2fsdp2", {"dp_replicate": 2, "dp_shard": 2, "sharding": "fsdp2"}),
        ("tp2", {"tp": 2, "sequence_parallel": False}),
        ("tp2sp", {"tp": 2, "sequence_parallel": True}),
        ("pp2", {"pp": 2, "schedule": "1f1b"}),
        ("pp2-gpipe", {"pp": 2, "schedule": "gpipe"}),
        ("pp2-interleaved", {"pp": 2, "schedule": "interleaved1f1b", "virtual_stages": 2}),
        ("pp2-zerobubble", {"pp": 2, "schedule": "zerobubble", "virtual_stages": 2}),
        ("tp2pp2", {"tp": 2, "pp": 2}),
        ("pp2tp2", {"tp": 2, "pp": 2}),
        ("DP2xTP2", {"dp_replicate": 2, "tp": 2}),
        ("dp2-tp2sp-pp2-gpipe", {"dp_replicate": 2, "tp": 2, "pp": 2, "sequence_parallel": True}),
        ("fsdp2pp2", {"dp_shard": 2, "pp": 2, "sharding": "fsdp2"}),
    ],
)
def test_a_name_is_its_plan(name: str, fields: dict[str, Any]) -> None:
    plan = planned(name)
    assert isinstance(plan, Plan)
    assert {key: getattr(plan, key) for key in fields} == fields
    assert plan.global_batch == 8


@pytest.mark.parametrize(
    "name",
    ["ddp2", "dp2fsdp2tp2pp2", "tp2sppp2", "pp2-gpipe", "pp2v2", "pp2v2-zerobubble", "dp2tp2", "single"],
)
def test_a_plans_own_name_is_understood(name: str) -> None:
    plan = planned(name)
    assert isinstance(plan, Plan) and plan.name == name


def test_every_step_has_several_micro_batches_where_the_batch_allows() -> None:
    for name in ("single", "ddp2", "ddp4", "tp2", "pp2", "dp2pp2"):
        plan = planned(name)
        assert isinstance(plan, Plan) and plan.accumulation >= 2, name


def test_a_schedules_rule_decides_the_micro_batch() -> None:
    plan = planned("pp4")
    assert isinstance(plan, Plan) and (plan.micro_batch, plan.accumulation) == (2, 4)
    too_few = planned("dp2pp4", batch=4)
    assert isinstance(too_few, NotRun) and "1f1b with pp=4 needs at least 4 micro-batches" in too_few.reason


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("ddp3", "does not divide the global batch 8"),
        ("ddp16", "does not divide the global batch 8"),
        ("tp8", "tp=8 does not divide num_key_value_heads=4"),
        ("pp8", "pp=8 is more than the model's 4 layers"),
        ("pp4-interleaved", "is more than the model's 4 layers"),
        ("fsdp1", "fsdp2 over one rank shares nothing out"),
        ("zero2dp3", "does not divide the global batch 8"),
        ("dataparallel", "only calls the module on a CPU"),
        ("dataparallel3", "does not divide the global batch 8"),
    ],
)
def test_what_cannot_be_here_is_not_run_with_its_reason(name: str, sentence: str) -> None:
    refused = planned(name)
    assert isinstance(refused, NotRun) and not refused.started
    assert sentence in refused.reason


def test_data_parallel_is_one_process_on_two_gpus() -> None:
    for name in ("dataparallel", "dataparallel2"):
        plan = planned(name, hardware=gpus(2))
        assert isinstance(plan, Plan) and plan.name == "dataparallel2"
        assert (plan.processes, plan.world_size, plan.shares, plan.rows) == (1, 2, 1, 2 * plan.micro_batch)
        assert plan.global_batch == 8
    alone = planned("dataparallel", hardware=gpus(1))
    assert isinstance(alone, NotRun) and "1 can be used here" in alone.reason


def test_more_ranks_than_gpus_are_not_run() -> None:
    refused = planned("dp2tp2", hardware=gpus(2))
    assert isinstance(refused, NotRun) and "2 can be used here" in refused.reason
    assert isinstance(planned("tp2", hardware=gpus(2)), Plan)


def test_zero_bubble_is_for_full_tuning() -> None:
    refused = planned("pp2-zerobubble", method="lora")
    assert isinstance(refused, NotRun) and "lora" in refused.reason


def test_a_family_that_cannot_be_cut_is_not_run() -> None:
    other = model_spec({"model_type": "gpt2"})
    asked = problem(cpu(2), other, train_params(global_batch=8, finetuning_type="full"), precision="float32")
    assert isinstance(plan_for(parse_name("ddp2"), asked, "float32"), Plan)
    refused = plan_for(parse_name("pp2"), asked, "float32")
    assert isinstance(refused, NotRun) and "pp2" in refused.reason


def test_less_memory_means_smaller_micro_batches_then_recomputing() -> None:
    """What the planner says does not fit is not what is tried first."""
    wide = SPEC.model_copy(update={"hidden": 4096, "ffn": 16384, "layers": 32})
    levels = set()
    for gib in (2, 60, 400):
        asked = problem(gpus(1, gib=gib), wide, train_params(global_batch=8), precision="float32")
        plan = plan_for(parse_name("single"), asked, "float32")
        assert isinstance(plan, Plan)
        levels.add((plan.micro_batch, plan.activation_checkpointing))
    assert len(levels) > 1 and (4, "none") in levels and (1, "full") in levels


@pytest.mark.parametrize(
    "name",
    [
        "tp",
        "2tp",
        "tp0",
        "ddp2dp2",
        "tp2tp2",
        "tp2-gpipe",
        "zero4",
        "zero1+cpu",
        "zero2+nvme",
        "ep2",
        "pp2sp",
        "tp2v2",
        "pp2-best",
        "fsdp",
    ],
)
def test_a_name_that_is_no_plan_is_a_users_mistake(name: str) -> None:
    with pytest.raises(UserError, match="is no plan; use single, ddp2") as error:
        parse_name(name)
    assert repr(name) in str(error.value)
