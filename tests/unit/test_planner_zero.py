"""ZeRO and offload of the engine deepspeed in numbers: what stands on a GPU, what in host memory, what is sent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tasks.planner import zero
from tasks.planner.capabilities import EVERYTHING, TRAINABLE_NOW
from tasks.planner.ground import Ground
from tasks.planner.hardware_names import named_hardware
from tasks.planner.host_memory import host_memory
from tasks.planner.legal import broken
from tasks.planner.machine import machine
from tasks.planner.memory import GIB, memory
from tasks.planner.moments import ADAMW
from tasks.planner.problem import Pins, Problem
from tasks.planner.search import search
from tasks.planner.time import seconds
from tasks.planner.workload import Workload
from tasks.trainer import zero_config
from tests.tiny import cpu_plan
from tests.unit.planner_cases import LLAMA_7B, TINY, gpus, train_params

T = LLAMA_7B.parameters
FULL = Workload("full", "bfloat16", 512, 400.0)
LORA = replace(FULL, method="lora")


def plan_of(sharding: str, ranks: int = 4, accumulation: int = 2, **more: object):
    fields = {"engine": "deepspeed", "device": "cuda", "backend": "nccl", "sharding": sharding}
    return cpu_plan(accumulation=accumulation, shards=ranks, **(fields | more))


def close(expected: float):
    return pytest.approx(expected, rel=1e-3)


def test_what_is_counted_is_what_the_engine_is_told():
    told = zero_config.zero_config(plan_of("zero3", offload="cpu"), train_params())["zero_optimization"]
    assert told["reduce_bucket_size"] == told["stage3_prefetch_bucket_size"] == zero.BUCKET
    assert told["stage3_max_live_parameters"] == told["stage3_max_reuse_distance"] == zero.LIVE["none"]
    assert told["sub_group_size"] == zero.SUB_GROUP["cpu"]
    plan = plan_of("zero3", offload="nvme", offload_parameters="nvme")
    disk = zero_config.zero_config(plan, train_params(), Path("fast"))["zero_optimization"]
    assert disk["sub_group_size"] == zero.SUB_GROUP["nvme"]
    assert disk["stage3_max_live_parameters"] == zero.LIVE["nvme"]
    assert 5 * 4 * disk["offload_param"]["buffer_size"] * plan.dp_shard == zero.PARAMETER_BUFFERS
    assert zero.pinned(4 * zero.SUB_GROUP["cpu"]) == 4 * GIB


# Bytes a trained parameter on four ranks: weights, gradients and optimizer state with the copy that it moves. Counted
# in the engine's buffers on one rank: 16 after a step of ZeRO-1 and 2, whose gradients are gone by then, 20 of ZeRO-3.
@pytest.mark.parametrize(
    ("sharding", "weights", "gradients", "optimizer"),
    [("zero0", 4, 4, 8), ("zero1", 4, 4, 3), ("zero2", 4, 2, 3), ("zero3", 1, 1, 3)],
)
def test_states_are_those_of_deepspeed(sharding, weights, gradients, optimizer):
    terms = memory(LLAMA_7B, plan_of(sharding), FULL)
    found = terms["weights"], terms["gradients"], terms["optimizer"]
    assert found == (close(weights * T), close(gradients * T), close(optimizer * T))


def test_zero_1_sums_in_whole_gradients_only_where_it_accumulates():
    rows = replace(FULL, sequence=8, mean_row=8.0)  # few activations, beside which gradients count
    once = memory(LLAMA_7B, plan_of("zero1", ranks=16, accumulation=1), rows)["gradients"]
    summed = memory(LLAMA_7B, plan_of("zero1", ranks=16), rows)["gradients"]
    assert once < 8 / 16 * T and summed == close(4 * T)
    # ZeRO-3's buffer of them is there from the start.
    assert memory(LLAMA_7B, plan_of("zero3", accumulation=1), FULL)["gradients"] == close(T)


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "zero3"])
def test_autocasts_copies_stay_to_the_backward_pass_unless_layers_are_recomputed(sharding):
    kept, recomputed = (
        memory(LLAMA_7B, plan_of(sharding, activation_checkpointing=level), FULL)
        for level in ("none", "full")
    )
    assert kept["casts"] == close(2 * (T - LLAMA_7B.embedding_parameters)) and not recomputed.get("casts")
    assert not memory(LLAMA_7B, plan_of(sharding), replace(FULL, precision="float32")).get("casts")


def test_zero_3_gathers_in_float32_and_frozen_weights_as_they_are():
    largest = LLAMA_7B.embedding_parameters
    full, lora = (memory(LLAMA_7B, plan_of("zero3"), work) for work in (FULL, LORA))
    assert full["gathered"] == close(4 * (zero.LIVE["none"] + largest) + 8 * largest)
    assert lora["gathered"] == close(2 * (zero.LIVE["none"] + largest))
    again = memory(LLAMA_7B, plan_of("zero3", activation_checkpointing="full"), FULL)["gathered"]
    assert again - full["gathered"] == close(2 * LLAMA_7B.layer_parameters)
    adapters = memory(LLAMA_7B, plan_of("zero3", ranks=1), LORA)["gradients"] / 4
    assert lora["weights"] == close(
        2 * T / 4 + (1 + 1 / 4) * 4 * adapters
    )  # small parameters stay whole, too


def test_buckets_are_small_and_of_full_size():
    for sharding in ("zero1", "zero2", "zero3"):
        assert memory(TINY, plan_of(sharding), LORA)["buckets"] == 2 * 4 * zero.BUCKET
    away = memory(LLAMA_7B, plan_of("zero2", offload="cpu"), FULL)["buckets"]
    assert away == 2 * 4 * zero.BUCKET + 4 * LLAMA_7B.embedding_parameters


@pytest.mark.parametrize("sharding", ["zero2", "zero3"])
def test_an_offloaded_optimizer_leaves_weights_and_buckets(sharding):
    terms = memory(LLAMA_7B, plan_of(sharding, offload="cpu"), FULL)
    assert (terms["gradients"], terms["optimizer"]) == (0, 0)
    assert terms["weights"] == close(4 * T / (4 if sharding == "zero3" else 1))
    away = memory(LLAMA_7B, plan_of("zero3", offload="cpu", offload_parameters="cpu"), FULL)
    assert away["weights"] == 0 and away["gathered"] > 0


# Counted in the engine's buffers on one rank, weights on the device apart: 20 bytes a parameter of ZeRO-3, 24 with its
# parameters, 24 of ZeRO-2 that accumulates.
@pytest.mark.parametrize(
    ("sharding", "parameters", "accumulation", "expected"),
    [("zero3", "none", 2, 20), ("zero3", "cpu", 2, 24), ("zero2", "none", 2, 24), ("zero2", "none", 1, 20)],
)
def test_host_memory_is_that_of_deepspeed(sharding, parameters, accumulation, expected, monkeypatch):
    monkeypatch.setattr(zero, "pinned", lambda size, piece=0: size)
    plan = plan_of(sharding, 2, accumulation, offload="cpu", offload_parameters=parameters)
    terms = host_memory(LLAMA_7B, plan, FULL, machine(named_hardware("2xH100"), "bfloat16"))
    states = sum(size for name, size in terms.items() if name not in ("processes", "loading"))
    assert states == close(expected * T)


def test_pinned_memory_is_rounded_up_to_powers_of_two():
    assert zero.pinned(5.0) == 8 and zero.pinned(8.0) == 8 and zero.pinned(0.0) == 0
    assert zero.pinned(20.0, piece=7.0) == 8 + 8 + 8
    node = machine(named_hardware("RTX4090"), "bfloat16")
    plan = plan_of("zero3", 1, offload="cpu", offload_parameters="cpu")
    assert host_memory(LLAMA_7B, plan, FULL, node)["weights"] == 32 * GIB  # 25.1 GiB are


def test_frozen_weights_go_to_the_host_in_their_own_width():
    node = machine(named_hardware("2xH100"), "bfloat16")
    plan = plan_of("zero3", 2, offload="cpu", offload_parameters="cpu")
    full, lora = (host_memory(LLAMA_7B, plan, work, node) for work in (FULL, LORA))
    assert lora["optimizer"] < 0.02 * full["optimizer"]
    assert 2 * T <= lora["weights"] <= 4.5 * T


# --- time ---------------------------------------------------------------------------------------


def spent(sharding: str, work: Workload = FULL, hardware=None, **more: object) -> dict[str, float]:
    hardware = hardware or gpus(4, gib=80)
    return seconds(LLAMA_7B, plan_of(sharding, **more), work, machine(hardware, work.precision))


def test_float32_traffic_is_never_quicker_than_the_engine_torchs():
    ddp = cpu_plan(4, device="cuda", backend="nccl")
    node = machine(gpus(4, gib=80), "bfloat16")
    of_ddp = seconds(LLAMA_7B, ddp, FULL, node)["communication"]
    of_fsdp = spent("fsdp2", engine="torch")["communication"]
    assert of_ddp < spent("zero1")["communication"] <= spent("zero2")["communication"]
    assert of_ddp < spent("zero0")["communication"]
    assert 1.5 * of_fsdp < spent("zero3")["communication"]


def test_offload_pays_for_every_micro_batch_and_for_the_step():
    few, many = (spent("zero3", offload="cpu", accumulation=count) for count in (1, 8))
    assert many["communication"] > 4 * few["communication"] and many["optimizer"] == few["optimizer"]
    node = machine(gpus(4, gib=80), "bfloat16")
    assert few["optimizer"] > T * (ADAMW.moved + zero.HOST_COPY_BYTES) / node.host_bandwidth
    disk = spent("zero3", offload="nvme", accumulation=1)["optimizer"]
    assert disk - few["optimizer"] == close(T * (2 * ADAMW.state + zero.DISK_STEP_BYTES) / node.disk)


@pytest.mark.parametrize("words", ["2xA100-80G", "8xA100-40G", "4xRTX4090", "8xA100-80G"])
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("spec", [TINY, LLAMA_7B], ids=["small", "7B"])
def test_deepspeed_is_chosen_only_where_the_engine_torch_has_no_plan(spec, method, words):
    """Its plans send more and launch more than the engine torch's."""
    asked = Problem(spec, named_hardware(words), replace(FULL, method=method), 64, TRAINABLE_NOW)
    best = search(asked).fitting[0].plan
    alone = asked.changed(pins=Pins(engine="torch"))
    if best.engine == "deepspeed":
        with pytest.raises(Exception, match="no plan fits"):
            search(alone)
    else:
        assert search(alone).fitting[0].plan == best


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sharding", "more", "work", "sentence"),
    [
        ("zero2", {"tp": 2}, FULL, "zero2 does not go with tp=2: DeepSpeed takes every rank for a copy"),
        ("zero1", {"pp": 2, "schedule": "1f1b"}, FULL, "zero1 does not go with pp=2"),
        ("zero2", {}, replace(FULL, method="qlora"), "zero2 with qlora is not trained"),
        ("zero3", {"backend": "gloo"}, FULL, "zero3 on GPUs sends over nccl, and ddp_backend is gloo"),
        ("zero1", {"offload": "cpu"}, FULL, "offload=cpu needs DeepSpeed's zero2 or zero3"),
        ("zero2", {"offload": "nvme"}, FULL, "offload=nvme needs zero3"),
        ("zero3", {"offload_parameters": "cpu"}, FULL, "need an offloaded optimizer beside them"),
        (
            "zero2",
            {},
            replace(FULL, communication_hook="fp16"),
            "communication_hook=fp16 rounds what DDP sends",
        ),
        ("zero2", {"engine": "torch"}, FULL, "zero2 is not of the engine torch"),
        ("zero3", {"compiled": True}, FULL, "the engine torch alone compiles layers"),
    ],
)
def test_what_deepspeed_is_not_used_for_is_refused_with_the_way_out(sharding, more, work, sentence):
    hardware = gpus(8, gib=80)
    plan = plan_of(sharding, ranks=2, **({"micro_batch": 2} | more))
    fault = broken(plan, Ground(LLAMA_7B, work, hardware, plan.global_batch, 8, 8))
    assert fault is not None and sentence in fault.sentence and "; " in fault.sentence.replace(": ", "; ")


def test_capabilities_train_zero_and_offload_but_not_four_bits_beside_them():
    plan = plan_of("zero3", 2, offload="cpu")
    for able in (TRAINABLE_NOW, EVERYTHING):
        assert able.can(plan, LLAMA_7B, FULL, 2)
        assert not replace(able, offload=False).can(plan, LLAMA_7B, FULL, 2)
    asked = Problem(LLAMA_7B, gpus(2), replace(FULL, method="qlora"), 16, TRAINABLE_NOW)
    assert {candidate.plan.engine for candidate in search(asked).fitting} == {"torch"}
    assert {c.plan.engine for c in search(asked.changed(work=LORA)).fitting} == {"torch", "deepspeed"}


def test_zero_0_and_zero_on_a_cpu_come_only_where_they_are_said():
    from tests.unit.planner_cases import cpu, fitting, plans, strategy_params

    assert {c.plan.engine for c in plans(cpu(4), TINY)} == {"torch"}
    said = fitting(plans(cpu(4), TINY, strategy=strategy_params(sharding="zero2", data_parallel_degree=2)))
    assert {(c.plan.name, c.plan.backend) for c in said} >= {("zero2dp2", "gloo")}
    assert "zero0" not in {c.plan.sharding for c in plans(gpus(2), TINY)}
    alone = fitting(plans(gpus(2), TINY, strategy=strategy_params(sharding="zero0")))
    assert {c.plan.sharding for c in alone} == {"zero0"}
