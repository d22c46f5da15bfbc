"""What of params.yaml is pinned is kept, or named with the rule that stands against it."""

from __future__ import annotations

import pytest

from tasks.errors import UserError
from tasks.planner.model_spec import model_spec
from tasks.planner.nearest import NothingFits
from tasks.planner.problem import Pins
from tasks.planner.search import search
from tests.unit.planner_cases import (
    GIB,
    LLAMA_7B,
    TINY,
    WHOLE,
    chosen,
    cpu,
    fitting,
    gpus,
    manifest,
    plans,
    problem,
    strategy_params,
    train_params,
)

GEMMA = model_spec({"model_type": "gemma"})


def test_pins_are_kept():
    strategy = strategy_params(
        data_parallel_degree=2,
        per_device_train_batch_size=2,
        activation_checkpointing="full",
        sharding="none",
        compile=False,
        **WHOLE,
    )
    candidates = plans(gpus(8), strategy=strategy)
    assert len(candidates) == 1
    plan = chosen(candidates).plan
    assert (plan.dp_replicate, plan.micro_batch, plan.accumulation) == (2, 2, 4)
    assert plan.activation_checkpointing == "full"


@pytest.mark.parametrize("machine", [gpus(4), cpu(4)], ids=["gpus", "cpu"])
def test_pinned_sharding_and_degree_are_shards_times_copies(machine):
    strategy = strategy_params(data_parallel_degree=4, sharding="fsdp2", **WHOLE)
    found = [candidate.plan for candidate in plans(machine, strategy=strategy)]
    assert {(plan.dp_replicate, plan.dp_shard) for plan in found} == {(1, 4), (2, 2)}
    assert {plan.name for plan in found} == {"fsdp4", "dp2fsdp2"}
    free = {c.plan.sharding for c in plans(machine, strategy=strategy_params(data_parallel_degree=4))}
    assert free - {"zero1", "zero2", "zero3"} == {"none", "fsdp2"}
    assert ("zero2" in free) == (machine.device == "cuda")


def test_a_model_too_large_for_a_gpu_alone_is_sharded():
    full, data = train_params(finetuning_type="full"), manifest(longest=512)
    strategy = strategy_params(**WHOLE)
    plan = chosen(plans(gpus(4, gib=80), LLAMA_7B, train=full, data=data, strategy=strategy)).plan
    assert (plan.name, plan.engine) == ("fsdp4", "torch")
    free = chosen(plans(gpus(4, gib=80), LLAMA_7B, train=full, data=data)).plan
    assert free.world_size == 4 and (free.sharding == "fsdp2" or free.tp * free.pp == 4)
    whole = strategy_params(sharding="none", **WHOLE)
    with pytest.raises(UserError, match="no plan fits"):
        plans(gpus(4, gib=80), LLAMA_7B, train=full, data=data, strategy=whole)


def test_a_cpu_obeys_a_pinned_degree():
    plan = chosen(plans(cpu(2), strategy=strategy_params(data_parallel_degree=2))).plan
    assert (plan.name, plan.backend) == ("ddp2", "gloo")


def test_both_batch_pins_fix_the_degree():
    strategy = strategy_params(per_device_train_batch_size=4, gradient_accumulation_steps=2, **WHOLE)
    assert {c.plan.data_parallel for c in plans(gpus(4), strategy=strategy)} == {2}
    assert {c.plan.data_parallel for c in plans(cpu(4), strategy=strategy)} == {2}
    with pytest.raises(UserError, match=r"needs data_parallel_degree=2 .* 1 visible GPU"):
        plans(gpus(1), strategy=strategy)


def test_three_explicit_degrees_make_the_batch():
    strategy = strategy_params(
        per_device_train_batch_size=3, gradient_accumulation_steps=5, data_parallel_degree=2
    )
    assert (
        chosen(plans(gpus(2), train=train_params(global_batch="auto"), strategy=strategy)).plan.global_batch
        == 30
    )


@pytest.mark.parametrize(
    ("machine", "pins", "sentence"),
    [
        (
            gpus(2),
            {"data_parallel_degree": 4},
            "=4 needs a GPU a process, and 2 can be used here; use 1 or 2",
        ),
        (gpus(1), {"data_parallel_degree": 2}, "1 can be used here; use 1"),
        (gpus(8), {"tensor_parallel_degree": 2}, "tp=2 does not divide num_attention_heads=9; use tp=1 or 3"),
        (gpus(8), {"pipeline_parallel_degree": 31}, "pp=31 is more than the model's 30 layers"),
        (
            gpus(4),
            {"data_parallel_degree": 2, "pipeline_parallel_degree": 4},
            "=2 needs a GPU a process, and 1 can be used here (beside tp=1 x pp=4); use 1",
        ),
        (gpus(4), {"pipeline_schedule": "1f1b", "pipeline_parallel_degree": 1}, "use pp=2 or more, or leave"),
        (cpu(2), {"pipeline_schedule": "gpipe"}, "schedule=gpipe does not go with pp=1; use pp=2 or more"),
        (cpu(2), {"sequence_parallel": True}, "with tp=1 has no ranks to cut a row over; use tp=2 or more"),
        (cpu(2), {"compile": True}, "for GPUs alone, and training is on the CPU here; use compile=false"),
        (
            gpus(4),
            {"pipeline_schedule": "zerobubble"},
            "zerobubble fills its bubble with gradients of weights, which lora hardly has; use 1f1b",
        ),
        (
            gpus(4),
            {"ddp_backend": "gloo", "tensor_parallel_degree": 3},
            "activations over nccl, and ddp_backend",
        ),
        (cpu(2), {"ddp_backend": "nccl"}, "ddp_backend=nccl needs CUDA GPUs"),
        (
            cpu(2),
            {"sharding": "fsdp2"},
            "given one process unless a degree is said; use data_parallel_degree=2",
        ),
        (gpus(2), {"sharding": "fsdp2", "data_parallel_degree": 1}, "data_parallel_degree=1 leaves one"),
        (gpus(1), {"sharding": "fsdp2"}, "and 1 GPU can be used here; use more GPUs, or sharding=auto"),
        (
            gpus(3),
            {"sharding": "fsdp2", "per_device_train_batch_size": 16},
            "train.global_batch=16; use another",
        ),
        (gpus(2), {"sharding": "fsdp2", "ddp_backend": "gloo"}, "ddp_backend is gloo; use nccl or auto"),
        (gpus(2), {"sharding": "zero2", "ddp_backend": "gloo"}, "sends over nccl, and ddp_backend is gloo"),
        (cpu(2), {"sharding": "zero2", "engine": "torch"}, "zero2 is not of the engine torch; use deepspeed"),
        (gpus(2), {"offload": "cpu", "engine": "torch"}, "offload=cpu needs DeepSpeed's zero2 or zero3"),
        (gpus(2), {"offload": "cpu", "sharding": "zero1"}, "zero2 or zero3 and sharding is zero1; use these"),
        (gpus(2), {"offload": "nvme", "sharding": "zero2"}, "offload=nvme needs zero3"),
        (gpus(2), {"offload": "none", "offload_parameters": "cpu"}, "beside them; set offload=cpu too"),
        (gpus(2), {"sharding": "zero2", "offload_parameters": "cpu"}, "needs zero3 and sharding is zero2"),
        (gpus(3), {"sharding": "zero2", "tensor_parallel_degree": 3}, "zero2 does not go with tp=3"),
        (gpus(2), {"sharding": "zero1", "pipeline_parallel_degree": 2}, "zero1 does not go with pp=2"),
    ],
)
def test_illegal_pins_name_value_rule_and_way_out(machine, pins, sentence):
    with pytest.raises(UserError) as caught:
        plans(machine, strategy=strategy_params(**pins))
    assert sentence in str(caught.value)


@pytest.mark.parametrize(("machine", "use"), [(gpus(8), "1, 2, 4 or 8"), (cpu(2), "1, 2, 4, 8 or 16")])
def test_a_degree_that_does_not_divide_the_batch_names_those_that_do(machine, use):
    with pytest.raises(UserError, match=f"=3 does not divide train.global_batch=16; use {use}"):
        search(problem(machine).changed(pins=Pins(data_parallel=3)))


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        ({"tensor_parallel_degree": 2}, "select_strategy.tensor_parallel_degree=2"),
        ({"pipeline_parallel_degree": 2}, "select_strategy.pipeline_parallel_degree=2"),
        ({"pipeline_schedule": "1f1b"}, "select_strategy.pipeline_schedule=1f1b"),
        ({"sequence_parallel": True}, "select_strategy.sequence_parallel=true"),
    ],
)
def test_a_family_that_is_not_cut_is_named_if_a_pin_asks_for_it(pins, said):
    with pytest.raises(UserError) as caught:
        plans(gpus(8, gib=80), GEMMA, strategy=strategy_params(**pins))
    assert str(caught.value).startswith(f"{said} cannot be trained: ")
    assert (
        "layers of bloom, glm, glm4, llama, llama_alibi, mistral, qwen2, qwen3, and the model's family is gemma; use"
        in str(caught.value)
    )
    free = fitting(plans(gpus(8, gib=80), GEMMA))
    assert {(c.plan.tp, c.plan.pp) for c in free} == {(1, 1)}


@pytest.mark.parametrize(("tp", "pp", "dp"), [(2, 1, 1), (1, 2, 1), (2, 2, 2), (1, 4, 2)])
def test_a_cpu_starts_as_many_processes_as_all_degrees_make(tp, pp, dp):
    pins = {"tensor_parallel_degree": tp, "pipeline_parallel_degree": pp, "data_parallel_degree": dp}
    found = fitting(plans(cpu(4, gib=64), TINY, strategy=strategy_params(**pins)))
    assert {(c.plan.tp, c.plan.pp, c.plan.data_parallel) for c in found} == {(tp, pp, dp)}
    assert {(c.plan.world_size, c.plan.backend) for c in found} == {(tp * pp * dp, "gloo")}
    assert {c.estimate.memory_limit_bytes for c in found} == {int(64 * GIB * 0.9 / (tp * pp * dp))}
    open_degree = pins | {"data_parallel_degree": "auto"}
    assert (
        fitting(plans(cpu(4, gib=64), TINY, strategy=strategy_params(**open_degree)))[0].plan.data_parallel
        == 1
    )


def test_pins_of_schedule_and_sequence_parallelism_are_kept():
    full = train_params(finetuning_type="full", global_batch=16)
    pins = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}
    for schedule in ("gpipe", "1f1b", "interleaved1f1b", "zerobubble"):
        strategy = strategy_params(pipeline_schedule=schedule, sequence_parallel=False, **pins)
        found = fitting(plans(gpus(4, gib=80), TINY, full, strategy))
        assert {(c.plan.schedule, c.plan.sequence_parallel) for c in found} == {(schedule, False)}
    free = fitting(plans(gpus(4, gib=80), TINY, full, strategy_params(**pins)))
    assert {c.plan.sequence_parallel for c in free} == {True}


@pytest.mark.parametrize("hook", ["fp16", "bf16", "powersgd"])
def test_a_communication_hook_leaves_ddp_and_one_process(hook):
    train = train_params(communication_hook=hook)
    found = plans(gpus(4, gib=80), TINY, train)
    assert {c.plan.name for c in fitting(found)} == {"single", "ddp2", "ddp4"}
    told = [c.rejected for c in found if c.estimate is None]
    assert any(f"train.communication_hook={hook} rounds what DDP sends, and" in text for text in told)
    with pytest.raises(UserError, match=f"communication_hook={hook} rounds .*; use sharding=none with tp=1"):
        plans(gpus(4, gib=80), TINY, train, strategy_params(tensor_parallel_degree=2))
    full = train_params(communication_hook=hook, finetuning_type="full")
    with pytest.raises(NothingFits, match=r"set train\.communication_hook=none, which fits as"):
        plans(gpus(8, gib=40), LLAMA_7B, full)


def test_powersgd_in_float16_is_refused_between_ranks():
    train = train_params(communication_hook="powersgd")
    found = plans(gpus(4, gib=80), TINY, train, precision="float16")
    assert {c.plan.name for c in fitting(found)} == {"single"}
    with pytest.raises(UserError, match="infinities of a float16 overflow"):
        plans(gpus(4, gib=80), TINY, train, strategy_params(data_parallel_degree=2), precision="float16")


@pytest.mark.parametrize("machine", [gpus(2, gib=80), cpu(2)], ids=["gpus", "cpu"])
def test_pins_of_offload_are_kept_and_bring_zero_with_them(machine):
    for offload, weights, name in (
        ("cpu", "none", "zero2dp1+cpu"),
        ("auto", "cpu", "zero3dp1+cpu+params-cpu"),
        ("cpu", "nvme", "zero3dp1+cpu+params-nvme"),
        ("nvme", "none", "zero3dp1+nvme"),
    ):
        strategy = strategy_params(offload=offload, offload_parameters=weights, data_parallel_degree=1)
        assert name in {c.plan.name for c in fitting(plans(machine, TINY, strategy=strategy))}
    # On a CPU nothing is gained by it.
    near = strategy_params(sharding="zero2", data_parallel_degree=1)
    names = {c.plan.name for c in fitting(plans(machine, TINY, strategy=near))}
    assert names == {"zero2dp1"} | ({"zero2dp1+cpu"} if machine.device == "cuda" else set())


def test_gloo_may_be_asked_for_on_gpus():
    found = fitting(plans(gpus(2), TINY, strategy=strategy_params(ddp_backend="gloo")))
    assert {(c.plan.name, c.plan.backend) for c in found} == {("single", "gloo"), ("ddp2", "gloo")}


def test_data_parallel_is_never_chosen_and_can_be_asked_for():
    """One process on one node, whole layers, nothing compiled; the default finds DDP."""
    found = plans(gpus(2), TINY)
    assert {candidate.plan.replication for candidate in found} == {"ddp"}
    asked = plans(gpus(2), TINY, strategy=strategy_params(replication="data_parallel"))
    assert {(c.plan.name, c.plan.processes, c.plan.compiled) for c in fitting(asked)} == {
        ("dataparallel2", 1, False)
    }
    assert chosen(asked).plan.world_size == 2
    ddp = strategy_params(replication="ddp", sharding="none")
    assert {c.plan.name for c in fitting(plans(gpus(2), TINY, strategy=ddp))} >= {"single", "ddp2"}


@pytest.mark.parametrize(
    ("machine", "pins", "sentence"),
    [
        (cpu(2), {}, "only calls the module on a CPU"),
        (gpus(1), {}, "needs two GPUs or more"),
        (gpus(2), {"tensor_parallel_degree": 2}, "replicates a whole model"),
        (gpus(2), {"sharding": "fsdp2"}, "replicates a whole model"),
        (gpus(2), {"compile": True}, "each copy would be compiled anew"),
    ],
)
def test_what_does_not_go_with_data_parallel_is_named(machine, pins, sentence):
    with pytest.raises(UserError, match=sentence):
        plans(machine, TINY, strategy=strategy_params(replication="data_parallel", **pins))
