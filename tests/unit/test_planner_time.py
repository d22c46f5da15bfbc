"""The time model's parts: links, and what each setting costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.contracts import Link
from tasks.planner.hardware_names import named_hardware
from tasks.planner.known_models import KNOWN
from tasks.planner.machine import machine
from tasks.planner.memory import memory
from tasks.planner.model_spec import model_spec
from tasks.planner.time import seconds
from tasks.planner.workload import ELASTANE, Workload, row_width
from tests.unit.planner_cases import LLAMA_7B, SMOL, cpu, gpus, plans, strategy_params


def a_plan(hardware, **changes):
    plan = plans(hardware, strategy=strategy_params(data_parallel_degree=1))[0].plan
    return plan.model_copy(update=changes)


def spent(hardware, spec=LLAMA_7B, method="lora", precision="bfloat16", mean=500.0, **changes):
    work = Workload(method, precision, int(mean), mean)
    return seconds(spec, a_plan(hardware, **changes), work, machine(hardware, precision))


def test_full_tuning_computes_up_to_half_as_much_again_as_lora():
    large = {"micro_batch": 16, "accumulation": 1}
    full, lora = (spent(gpus(1), method=method, **large)["compute"] for method in ("full", "lora"))
    assert 1.0 < full / lora < 1.5  # 6N to 4N, less what adapters move and attention computes


def test_recomputing_costs_one_forward_pass():
    full = spent(gpus(1), method="full", micro_batch=16, accumulation=1, activation_checkpointing="full")
    assert full["recompute"] / full["compute"] == pytest.approx(1 / 3, rel=0.06)
    assert spent(gpus(1))["recompute"] == 0


def test_small_micro_batches_are_slower_for_the_same_step():
    assert (
        spent(gpus(1), micro_batch=1, accumulation=16)["compute"]
        > 1.5 * spent(gpus(1), micro_batch=16, accumulation=1)["compute"]
    )


# Measured with this trainer on one H200 (benchmarks/planner_gpu.py), with plain and with compiled layers. The constants
# were set by these rows: the test holds them in place.
RESULTS = Path(__file__).parents[2] / "benchmarks/results"
MEASURED = [
    (compiled, row)
    for compiled, name in ((False, "planner-gpu.json"), (True, "planner-gpu-compiled.json"))
    for row in json.loads((RESULTS / name).read_text())["rows"]
    if row["measured"].get("seconds")
]
SHAPES = {"llama-1b": "llama-3.2-1b", "llama-3b": "llama-3.2-3b", "llama-8b": "llama-3.1-8b"}


@pytest.mark.parametrize(
    ("compiled", "row"),
    MEASURED,
    ids=lambda given: (
        "-".join(map(str, given["variant"])) if isinstance(given, dict) else f"compiled={given}"
    ),
)
def test_time_and_memory_are_near_those_measured_with_this_trainer(compiled, row):
    name, method, precision, length, micro_batch, accumulation, level = row["variant"]
    spec = model_spec(KNOWN[SHAPES[name]])
    hardware = named_hardware("H200")
    sizes = {"micro_batch": micro_batch, "accumulation": accumulation}
    plan = a_plan(hardware, activation_checkpointing=level, compiled=compiled, **sizes)
    work = Workload(method, precision, length, length)
    took = sum(seconds(spec, plan, work, machine(hardware, precision)).values())
    assert took == pytest.approx(row["measured"]["seconds"], rel=0.1 if compiled else 0.25)
    terms = memory(spec, plan, work)
    assert sum(terms.values()) - terms["fixed"] == pytest.approx(row["measured"]["peak_bytes"], rel=0.05)


def test_the_worst_link_counts():
    near = gpus(3)
    slow = near.model_copy(update={"links": (*near.links[:2], Link(a=1, b=2, kind="pcie", nvlinks=0))})
    assert machine(slow, "bfloat16").link < machine(near, "bfloat16").link / 8
    full = {"method": "full", "dp_replicate": 3}
    assert spent(slow, **full)["communication"] > 2 * spent(near, **full)["communication"]


def test_only_data_parallel_plans_communicate():
    assert spent(gpus(2))["communication"] == 0
    assert spent(gpus(2), method="full", dp_replicate=2)["communication"] > 0


def test_two_processes_share_one_cpu():
    one = spent(cpu(2), SMOL, precision="float32", micro_batch=8, accumulation=2)["compute"]
    two = spent(cpu(2), SMOL, precision="float32", micro_batch=8, accumulation=1, dp_replicate=2)["compute"]
    assert two == pytest.approx(one)


def test_half_precision_is_slow_where_there_are_no_units_for_it():
    assert spent(cpu(2), SMOL)["compute"] == pytest.approx(
        30 * spent(cpu(2), SMOL, precision="float32")["compute"]
    )
    old = gpus(1, "Tesla V100-SXM2-32GB", 32, (7, 0))
    assert spent(old)["compute"] > 3 * spent(old, precision="float16")["compute"]


def test_a_pipeline_idles_less_with_more_micro_batches_and_chunks():
    def share(**changes) -> float:
        terms = spent(gpus(4), pp=4, method="full", micro_batch=1, **changes)
        return terms["bubble"] / terms["compute"]

    few, many = share(schedule="1f1b", accumulation=4), share(schedule="1f1b", accumulation=16)
    assert few == pytest.approx(4 * many, rel=0.01)
    assert share(schedule="interleaved1f1b", virtual_stages=2, accumulation=4) == pytest.approx(
        few / 2, rel=0.01
    )


def test_tensor_traffic_is_dearer_between_nodes_than_within():
    one = spent(named_hardware("8xA100-80G"), tp=8)["tensor_parallel"]
    two = spent(named_hardware("4xA100-80G x 2 nodes ETH100"), tp=8)["tensor_parallel"]
    assert two > 5 * one


def test_offloaded_optimizers_pay_for_the_bus():
    plain, away = (
        spent(gpus(1), method="full", sharding="zero2", engine="deepspeed", offload=where)["optimizer"]
        for where in ("none", "cpu")
    )
    assert away > 5 * plain


# --- beside tensor and pipeline parallelism, hooks, compiling -----------------------------------


def test_a_pipelines_rows_are_all_as_long_as_the_longest_of_the_step():
    hardware, mean = gpus(2), 200.0
    recipe = Workload("full", "bfloat16", 2000, mean, padded=True)

    def width(**changes) -> float:
        return row_width(recipe, a_plan(hardware, micro_batch=1, accumulation=16, **changes))

    assert width() == mean
    assert width(pp=2, schedule="1f1b") > 0.7 * 2000


def test_gradients_of_copies_hide_only_under_plain_ddp():
    machine_of = {"method": "full", "micro_batch": 8, "accumulation": 2, "mean": 1000.0}
    plain = spent(gpus(4), dp_replicate=4, **machine_of)["communication"]
    beside = spent(gpus(8), dp_replicate=4, tp=2, sequence_parallel=True, **machine_of)["communication"]
    assert beside > 2 * plain  # half as many bytes, none of them hidden


def test_fsdp2_beside_a_pipeline_gathers_once_a_step():
    cut = {
        "method": "full",
        "micro_batch": 1,
        "pp": 2,
        "sharding": "fsdp2",
        "dp_shard": 4,
        "schedule": "1f1b",
    }
    few, many = (spent(gpus(8), accumulation=count, **cut) for count in (4, 32))
    assert many["communication"] == pytest.approx(few["communication"], rel=0.05)
    assert many["compute"] == pytest.approx(8 * few["compute"])


@pytest.mark.parametrize(("hook", "share"), [("fp16", 0.5), ("bf16", 0.5), ("powersgd", 1.0)])
def test_a_hook_sends_half_as_much_and_powersgd_is_taken_as_whole(hook, share):
    hardware = gpus(2)
    plan = a_plan(hardware, dp_replicate=2)
    sent = [
        seconds(
            LLAMA_7B,
            plan,
            Workload("full", "bfloat16", 8, 8.0, communication_hook=name),
            machine(hardware, "bfloat16"),
            replace(ELASTANE, overlap=0.0),
        )["communication"]
        for name in ("none", hook)
    ]
    assert sent[1] == pytest.approx(share * sent[0], rel=0.01)


def test_compiled_layers_launch_and_move_less():
    small, large = {"micro_batch": 1, "mean": 50.0}, {"micro_batch": 16, "mean": 1000.0}
    for sizes in (small, large):
        plain, compiled = (spent(gpus(1), compiled=each, **sizes)["compute"] for each in (False, True))
        assert compiled < plain
    # Few rows wait for launches alone: a layer's and those of its seven adapters.
    launches = [each.launch + 7 * each.adapter_launch for each in (ELASTANE, ELASTANE.compiled)]
    plain, compiled = (spent(gpus(1), compiled=each, **small)["compute"] for each in (False, True))
    assert compiled / plain == pytest.approx(launches[1] / launches[0], rel=0.1)


def test_cutting_a_layer_over_ranks_has_launches_of_its_own():
    small = {"micro_batch": 1, "accumulation": 4, "mean": 50.0}
    whole, cut = (spent(gpus(2), **small, **each)["compute"] for each in ({}, {"tp": 2}))
    assert cut - whole == pytest.approx(4 * LLAMA_7B.layers * 3 * ELASTANE.cut_launch, rel=0.1)


def test_what_is_recomputed_is_sent_again():
    cut = {"method": "full", "tp": 2, "sequence_parallel": True, "micro_batch": 4}
    sent = [
        spent(gpus(2), activation_checkpointing=level, **cut)["tensor_parallel"]
        for level in ("none", "selective", "full")
    ]
    assert sent[1] == sent[2] == pytest.approx(1.5 * sent[0])
