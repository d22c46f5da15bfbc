"""Every plan that is trained now, of many random machines, models and pins, against the rules checked on their own."""

from __future__ import annotations

import random
import re

from tasks.contracts import Candidate, Gpu, HardwareProfile
from tasks.errors import UserError
from tasks.planner.explain import why
from tasks.planner.model_spec import model_spec
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
            "model_type": draw.choice(["llama", "mistral", "qwen2", "qwen3"]),
            "hidden_size": heads * draw.choice([32, 64, 128]),
            "intermediate_size": draw.choice([512, 2048, 11008]),
            "num_hidden_layers": draw.choice([2, 16, 40]),
            "num_attention_heads": heads,
            "num_key_value_heads": draw.choice([1, 2, 4]),
            "vocab_size": draw.choice([1000, 32000, 151936]),
            "tie_word_embeddings": draw.choice([True, False]),
        }
    )


def check_now(candidate: Candidate, machine: HardwareProfile, batch: int, pins: dict[str, object]) -> None:
    """The rules of today's trainer, written from their statement and not from the search."""
    plan = candidate.plan
    degree = plan.dp_replicate * plan.dp_shard
    assert plan.micro_batch * plan.accumulation * degree == batch
    assert (plan.tp, plan.pp, plan.offload) == (1, 1, "none")
    assert (plan.engine, plan.replication) == ("torch", "ddp")
    assert plan.sharding == ("fsdp2" if plan.dp_shard > 1 else "none")
    assert plan.activation_checkpointing in ("none", "full")
    assert plan.device == machine.device
    if machine.device == "cuda":
        assert degree <= len(machine.gpus)
        room = min(gpu.memory_bytes for gpu in machine.gpus)
    else:
        assert degree == pins.get("data_parallel_degree", 1)
        room = machine.host_memory_bytes / degree
    for key, value in {
        "data_parallel_degree": degree,
        "sharding": plan.sharding,
        "per_device_train_batch_size": plan.micro_batch,
        "activation_checkpointing": plan.activation_checkpointing,
    }.items():
        assert pins.get(key, value) == value
    check_fit(candidate, room, machine)


def test_every_candidate_of_random_machines_keeps_the_rules():
    draw = random.Random(7)
    refused = planned = unfit = 0
    for _ in range(250):
        machine, spec = random_machine(draw), random_spec(draw)
        batch = draw.choice([1, 2, 6, 16, 24, 64])
        pins = {}
        if draw.random() < 0.3:
            pins["per_device_train_batch_size"] = draw.choice(
                [n for n in range(1, batch + 1) if batch % n == 0]
            )
        elif draw.random() < 0.3:
            most = len(machine.gpus) or batch
            pins["data_parallel_degree"] = draw.choice([n for n in range(1, most + 1) if batch % n == 0])
        if draw.random() < 0.3:
            pins["activation_checkpointing"] = draw.choice(["none", "full"])
        if draw.random() < 0.2:
            pins["sharding"] = draw.choice(["none", "fsdp2"])
        train = train_params(global_batch=batch, finetuning_type=draw.choice(["lora", "full"]))
        data = manifest(mean=64, longest=draw.choice([64, 512, 4096]))
        asked = problem(machine, spec, train, strategy_params(**pins), data).changed(evaluation_rows=1)
        try:
            found = search(asked)
        except UserError as error:
            if "sharding=fsdp2 shares weights out over two" in str(error):
                continue
            assert re.search(r"needs \d+\.\d+ GiB of \d+\.\d+ GiB", str(error))
            refused += 1
            continue
        planned += 1
        for candidate in found.candidates:
            check_now(candidate, machine, batch, pins)
            unfit += candidate.rejected is not None
        splits = [candidate.plan for candidate in found.candidates]
        assert len(set(splits)) == len(splits)
        times = [candidate.estimate.total_seconds for candidate in found.fitting]
        assert times[0] <= min(times) * 1.02
        assert why(asked, found)
    # The draw must reach every branch, or this test shows little.
    assert planned > 100 and refused > 20 and unfit > 50


def test_candidates_are_complete():
    found = {
        (
            *(c.plan.dp_replicate, c.plan.dp_shard, c.plan.micro_batch, c.plan.accumulation),
            c.plan.activation_checkpointing,
        )
        for c in plans(gpus(3), SMOL, train_params(global_batch=6))
    }
    expected = {
        (copies, shards, micro, accumulation, level)
        for copies, shards in ((1, 1), (2, 1), (3, 1), (1, 2), (1, 3))
        for micro in range(1, 7)
        for accumulation in range(1, 7)
        for level in ("none", "full")
        if copies * shards * micro * accumulation == 6
    }
    assert found == expected
