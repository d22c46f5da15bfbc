"""Every plan that is trained now, of many random machines, models and pins, against the rules checked on their own."""

from __future__ import annotations

import random
import re

from tasks.contracts import Candidate, Gpu, HardwareProfile, Plan
from tasks.errors import UserError
from tasks.planner.explain import why
from tasks.planner.model_spec import model_spec
from tasks.planner.nearest import NothingFits
from tasks.planner.problem import Problem
from tasks.planner.search import search
from tests.unit.planner_cases import (
    GIB,
    SMOL,
    check_fit,
    cpu,
    gpus,
    manifest,
    plans,
    problem,
    strategy_params,
    train_params,
)


def random_machine(draw: random.Random) -> HardwareProfile:
    count = draw.choice([0, 0, 1, 2, 3, 4, 6, 8])
    if not count:
        return cpu(draw.choice([1, 2, 16, 64]), draw.choice([4, 16, 256]))
    name, capability = draw.choice(
        [("NVIDIA A100-SXM4-80GB", (8, 0)), ("Tesla T4", (7, 5)), ("Some GPU", (12, 0))]
    )
    machine = gpus(count, name, 8, capability)
    cards = tuple(
        Gpu(name=name, memory_bytes=draw.choice([8, 16, 24, 80]) * GIB, compute_capability=capability)
        for _ in range(count)
    )
    return machine.model_copy(update={"gpus": cards})


def random_spec(draw: random.Random):
    heads = draw.choice([4, 8, 16, 32])
    return model_spec(
        {
            "model_type": draw.choice(["llama", "mistral", "qwen2", "qwen3", "glm4", "gemma", "phi3"]),
            "hidden_size": heads * draw.choice([32, 64, 128]),
            "intermediate_size": draw.choice([512, 2048, 11008]),
            "num_hidden_layers": draw.choice([2, 16, 40]),
            "num_attention_heads": heads,
            "num_key_value_heads": draw.choice([1, 2, 4]),
            "vocab_size": draw.choice([1000, 32000, 151936]),
            "tie_word_embeddings": draw.choice([True, False]),
        }
    )


def random_strategy(draw: random.Random, machine: HardwareProfile, batch: int) -> dict[str, object]:
    """Pins of params.yaml, some of which go neither with the machine nor with each other."""
    pins: dict[str, object] = {}
    most = len(machine.gpus) or batch
    if draw.random() < 0.3:
        pins["per_device_train_batch_size"] = draw.choice([n for n in range(1, batch + 1) if batch % n == 0])
    elif draw.random() < 0.3:
        pins["data_parallel_degree"] = draw.choice([n for n in range(1, most + 1) if batch % n == 0])
    for key, chance, values in (
        ("tensor_parallel_degree", 0.15, [1, 2, 4]),
        ("pipeline_parallel_degree", 0.15, [1, 2, 4]),
        ("pipeline_schedule", 0.1, ["gpipe", "1f1b", "interleaved1f1b", "zerobubble"]),
        ("sequence_parallel", 0.1, [True, False]),
        ("activation_checkpointing", 0.3, ["none", "selective", "full"]),
        ("compile", 0.2, [True, False]),
        ("sharding", 0.3, ["none", "fsdp2", "zero0", "zero1", "zero2", "zero3"]),
        ("offload", 0.1, ["none", "cpu", "nvme"]),
    ):
        if draw.random() < chance:
            pins[key] = draw.choice(values)
    return pins


def check_deepspeed(plan: Plan, machine: HardwareProfile, pins: dict[str, object], degree: int) -> None:
    """ZeRO over all ranks and nothing beside it; without offload only where it shares something out or is pinned."""
    assert (plan.dp_replicate, plan.tp, plan.pp, plan.compiled) == (1, 1, 1, False)
    said = str(pins.get("sharding", "")).startswith("zero") or pins.get("offload", "none") != "none"
    assert said or (machine.device == "cuda" and (degree > 1 or plan.offload != "none"))
    assert plan.sharding in ("zero1", "zero2", "zero3") or pins.get("sharding") == plan.sharding == "zero0"
    with_offload = {
        "none": ("zero0", "zero1", "zero2", "zero3"),
        "cpu": ("zero2", "zero3"),
        "nvme": ("zero3",),
    }
    assert plan.sharding in with_offload[plan.offload]
    assert plan.offload_parameters in ("none", plan.offload)
    assert plan.offload_parameters == "none" or plan.sharding == "zero3"


def check_now(candidate: Candidate, asked: Problem, pins: dict[str, object]) -> None:
    """The rules of today's trainer, written from their statement and not from the search."""
    plan, machine, batch = candidate.plan, asked.hardware, asked.batch
    degree = plan.dp_replicate * plan.dp_shard
    world = degree * plan.tp * plan.pp
    assert plan.micro_batch * plan.accumulation * degree == batch
    assert plan.replication == "ddp"
    if plan.engine == "deepspeed":
        check_deepspeed(plan, machine, pins, degree)
    else:
        assert (plan.sharding, plan.offload) == ("fsdp2" if plan.dp_shard > 1 else "none", "none")
    assert plan.activation_checkpointing in ("none", "selective", "full")
    assert plan.device == machine.device
    if asked.spec.family not in ("llama", "mistral", "qwen2", "qwen3", "glm", "glm4", "bloom", "llama_alibi"):
        assert (plan.tp, plan.pp) == (1, 1)
    assert all(width % plan.tp == 0 for width in (asked.spec.heads, asked.spec.kv_heads, asked.spec.ffn))
    assert plan.sequence_parallel <= (plan.tp > 1)
    assert plan.pp * plan.virtual_stages <= asked.spec.layers and (plan.pp > 1) == (plan.schedule != "none")
    if plan.schedule == "zerobubble":
        assert (plan.activation_checkpointing, plan.compiled, asked.work.method) == ("none", False, "full")
    if asked.work.communication_hook != "none":
        assert world == plan.dp_replicate
    if machine.device == "cuda":
        assert world <= len(machine.gpus)
        room = min(gpu.memory_bytes for gpu in machine.gpus)
    else:
        named = ("data_parallel_degree", "tensor_parallel_degree", "pipeline_parallel_degree")
        assert (degree, plan.tp, plan.pp) == tuple(pins.get(name, 1) for name in named)
        assert not plan.compiled
        room = machine.host_memory_bytes / world
    for key, value in {
        "data_parallel_degree": degree,
        "tensor_parallel_degree": plan.tp,
        "pipeline_parallel_degree": plan.pp,
        "pipeline_schedule": plan.schedule,
        "sequence_parallel": plan.sequence_parallel,
        "compile": plan.compiled,
        "sharding": plan.sharding,
        "offload": plan.offload,
        "per_device_train_batch_size": plan.micro_batch,
        "activation_checkpointing": plan.activation_checkpointing,
    }.items():
        assert pins.get(key, value) == value
    check_fit(candidate, room, machine)


def test_every_candidate_of_random_machines_keeps_the_rules():
    draw = random.Random(7)
    refused = illegal = unfit = 0
    seen: set[tuple[object, ...]] = set()
    for _ in range(400):
        machine, spec = random_machine(draw), random_spec(draw)
        batch = draw.choice([1, 2, 6, 16, 24, 64])
        pins = random_strategy(draw, machine, batch)
        train = train_params(
            global_batch=batch,
            finetuning_type=draw.choice(["lora", "full"]),
            communication_hook=draw.choice(["none"] * 5 + ["bf16"]),
        )
        data = manifest(rows=draw.choice([100, 100_000]), mean=64, longest=draw.choice([64, 512, 4096]))
        asked = problem(machine, spec, train, strategy_params(**pins), data).changed(evaluation_rows=1)
        try:
            found = search(asked)
        except NothingFits as error:
            assert re.search(r"needs \d+\.\d+ GiB of \d+\.\d+ GiB", str(error))
            refused += 1
            continue
        except UserError as error:
            assert pins and re.search(r"; (use|leave|set|make)", str(error)), str(error)
            illegal += 1
            continue
        costed = (*found.fitting, *found.rejected)
        for candidate in costed:
            check_now(candidate, asked, pins)
            unfit += candidate.rejected is not None
            plan = candidate.plan
            seen.add((plan.schedule, plan.tp > 1, plan.compiled, plan.sharding, plan.device))
        splits = [candidate.plan for candidate in costed]
        assert len(set(splits)) == len(splits)
        a_step = [c.estimate.total_seconds + c.plan.compiled * 90 / asked.steps for c in found.fitting]
        assert a_step[0] <= min(a_step) * 1.02 or pins.get("compile")
        assert why(asked, found)
    # The draw must reach every branch, or this test shows little.
    assert refused > 20 and illegal > 20 and unfit > 50
    kinds = [{entry[place] for entry in seen} for place in range(4)]
    assert kinds[0] == {"none", "gpipe", "1f1b", "interleaved1f1b", "zerobubble"}
    assert kinds[1:3] == [{True, False}, {True, False}]
    assert kinds[3] == {"none", "fsdp2", "zero0", "zero1", "zero2", "zero3"}
    assert ("1f1b", True, False, "none", "cpu") in seen


def test_candidates_are_complete():
    whole = {"tensor_parallel_degree": 1, "pipeline_parallel_degree": 1, "compile": False, "engine": "torch"}
    found = {
        (
            *(c.plan.dp_replicate, c.plan.dp_shard, c.plan.micro_batch, c.plan.accumulation),
            c.plan.activation_checkpointing,
        )
        for c in plans(gpus(3), SMOL, train_params(global_batch=6), strategy_params(**whole))
    }
    expected = {
        (copies, shards, micro, accumulation, level)
        for copies, shards in ((1, 1), (2, 1), (3, 1), (1, 2), (1, 3))
        for micro in range(1, 7)
        for accumulation in range(1, 7)
        for level in ("none", "selective", "full")
        if copies * shards * micro * accumulation == 6
    }
    assert found == expected
