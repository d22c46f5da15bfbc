"""The time model's parts: rates by name, links, and what each setting costs."""

from __future__ import annotations

import pytest

from tasks.contracts import Gpu, Link
from tasks.planner.memory import GIB
from tasks.planner.model_spec import model_spec
from tasks.planner.time import RATES, link_bytes_per_second, rate_of, seconds
from tests.unit.planner_cases import LLAMA_7B, SMOL, cpu, gpus, plans, strategy_params, train_params


def card(name: str, capability: tuple[int, int] = (8, 0)) -> Gpu:
    return Gpu(name=name, memory_bytes=GIB, compute_capability=capability)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GB200", "GB200"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX 3090"),
        ("NVIDIA RTX 6000 Ada Generation", "6000 Ada"),
    ],
)
def test_drivers_names_find_their_rate(name, key):
    assert rate_of(card(name)) == (RATES[key], True)


@pytest.mark.parametrize("name", ["NVIDIA RTX A1000", "NVIDIA RTX A4000", "NVIDIA T400", "NVIDIA X1"])
def test_names_that_only_begin_alike_are_not_taken(name):
    assert rate_of(card(name))[1] is False


def test_unknown_cards_are_taken_by_their_generation():
    assert (
        rate_of(card("X", (9, 0)))[0].half
        > rate_of(card("X", (8, 6)))[0].half
        > rate_of(card("X", (6, 1)))[0].half
    )


def a_plan(machine, **changes):
    plan = plans(machine, strategy=strategy_params(data_parallel_degree=1))[0].plan
    return plan.model_copy(update=changes)


def spent(machine, spec=LLAMA_7B, method="lora", precision="bfloat16", mean=500.0, **changes):
    return seconds(
        spec, a_plan(machine, **changes), train_params(finetuning_type=method), machine, precision, mean
    )


def test_full_tuning_computes_half_as_much_again_as_lora():
    large = {"micro_batch": 16, "accumulation": 1}
    full, lora = (spent(gpus(1), method=method, **large)["compute"] for method in ("full", "lora"))
    assert 1.4 < full / lora < 1.5  # 6N to 4N, less adapters and attention


def test_recomputing_costs_one_forward_pass():
    full = spent(gpus(1), method="full", micro_batch=16, accumulation=1, activation_checkpointing="full")
    assert full["recompute"] / full["compute"] == pytest.approx(1 / 3, rel=0.02)
    assert spent(gpus(1))["recompute"] == 0


def test_small_micro_batches_are_slower_for_the_same_step():
    assert (
        spent(gpus(1), micro_batch=1, accumulation=16)["compute"]
        > 1.5 * spent(gpus(1), micro_batch=16, accumulation=1)["compute"]
    )


# Measured with this trainer on one H200: benchmarks/results/first-light-h200-x1-small-batches.json (compute share of
# a step, over the step's micro-batches). Fitted on these rows: the test holds the constants in place.
@pytest.mark.parametrize(
    ("method", "precision", "micro_batch", "measured"),
    [("full", "bfloat16", 4, 0.080), ("lora", "float16", 8, 0.190)],
)
def test_small_micro_batches_take_as_long_as_measured(method, precision, micro_batch, measured):
    spec = model_spec(
        {
            "model_type": "llama",
            "vocab_size": 259,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 18,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
        }
    )
    plan = a_plan(gpus(1), micro_batch=micro_batch, accumulation=1)
    train = train_params(finetuning_type=method)
    predicted = seconds(spec, plan, train, gpus(1), precision, 630)["compute"]
    assert predicted == pytest.approx(measured, rel=0.25)


def test_the_worst_link_counts():
    machine = gpus(3)
    plan = a_plan(machine, dp_replicate=3)
    fast = link_bytes_per_second(machine, plan)
    slow = machine.model_copy(update={"links": (*machine.links[:2], Link(a=1, b=2, kind="pcie", nvlinks=0))})
    assert link_bytes_per_second(slow, plan) < fast / 10
    assert link_bytes_per_second(slow, a_plan(machine, dp_replicate=2)) == fast  # ranks 0 and 1 alone


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
