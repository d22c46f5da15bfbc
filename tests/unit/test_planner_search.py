"""Which plans are legal, which is chosen, and what is said of the others."""

from __future__ import annotations

import re

import pytest

from tasks.contracts import Candidate, Link
from tasks.errors import UserError
from tasks.planner.capabilities import EVERYTHING
from tasks.planner.explain import why
from tasks.planner.nearest import NothingFits, too_large
from tasks.planner.problem import Pins
from tasks.planner.search import KEPT, search
from tests.unit.planner_cases import (
    GIB,
    LLAMA_7B,
    cpu,
    gpus,
    manifest,
    plans,
    problem,
    strategy_params,
    train_params,
)


def chosen(candidates: tuple[Candidate, ...]) -> Candidate:
    assert candidates[0].rejected is None
    return candidates[0]


def fitting(candidates: tuple[Candidate, ...]) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate.rejected is None]


# --- choices ------------------------------------------------------------------------------------


def test_eight_a100_40g_train_lora_7b_as_ddp8():
    candidate = chosen(plans(gpus(8), LLAMA_7B, data=manifest(mean=400, longest=1024)))
    assert candidate.plan.name == "ddp8"
    assert candidate.plan.backend == "nccl"
    assert candidate.plan.global_batch == 16


def test_full_7b_on_24_gb_is_refused_with_numbers_and_the_way_out():
    machine = gpus(1, "NVIDIA GeForce RTX 4090", 24, (8, 9))
    with pytest.raises(UserError) as caught:
        plans(machine, LLAMA_7B, train_params(finetuning_type="full"))
    text = str(caught.value)
    need, limit = map(float, re.search(r"needs ([\d.]+) GiB of ([\d.]+) GiB", text).groups())
    assert limit == pytest.approx(24 * 0.9, abs=0.1)
    assert need > 16 * LLAMA_7B.parameters / GIB
    assert "micro-batch 1" in text and "activation_checkpointing=full" in text
    assert "set train.finetuning_type=lora, which fits" in text


def test_nothing_helps_names_length_and_model():
    with pytest.raises(UserError, match=r"smaller model.*prepare_data\.max_length.*512 tokens"):
        plans(gpus(1, gib=4), LLAMA_7B)


def test_a_pin_that_does_not_fit_says_to_drop_it():
    strategy = strategy_params(per_device_train_batch_size=16, activation_checkpointing="none")
    with pytest.raises(NothingFits) as caught:
        plans(gpus(1, gib=24), LLAMA_7B, strategy=strategy, data=manifest(longest=2048))
    keys = ("activation_checkpointing", "per_device_train_batch_size")
    said = " and ".join(f"select_strategy.{key}=auto" for key in keys)
    assert f"set {said}, which fits as" in str(caught.value)


def test_of_two_pins_the_one_that_stands_in_the_way_is_named():
    asked = problem(gpus(8, gib=80), LLAMA_7B, train_params(finetuning_type="full"))
    pins = Pins(data_parallel=8, sharding="none", micro_batch=1)
    with pytest.raises(NothingFits) as caught:
        search(asked.changed(pins=pins, options={"sharding": "--pin sharding={}"}))
    assert "; leave out --pin sharding=none, which fits as fsdp8, micro-batch 1 x" in str(caught.value)


@pytest.mark.parametrize(
    ("pins", "sentence"),
    [
        (
            Pins(offload="cpu", sharding="none"),
            "offload=cpu needs DeepSpeed's zero2 or zero3 and sharding is none",
        ),
        (Pins(schedule="gpipe", pp=1), "schedule=gpipe does not go with pp=1"),
        (Pins(engine="deepspeed", sharding="none"), "none is not of the engine deepspeed"),
        (Pins(offload_parameters="cpu", sharding="zero2"), "offload_parameters=cpu needs zero3"),
        (Pins(pp=4, schedule="1f1b", micro_batch=16), "1f1b with pp=4 needs at least 4 micro-batches"),
    ],
)
def test_pins_against_each_other_are_answered_by_their_rule(pins, sentence):
    with pytest.raises(UserError) as caught:
        search(problem(gpus(8, gib=80), LLAMA_7B, capabilities=EVERYTHING).changed(pins=pins))
    assert str(caught.value).startswith(sentence) and not isinstance(caught.value, NothingFits)


def test_every_rejection_is_kept_with_its_sentence():
    asked = problem(gpus(8, gib=40), LLAMA_7B, train_params(finetuning_type="full"), capabilities=EVERYTHING)
    found = search(asked)
    assert found.unfit > KEPT and len(found.rejected) == found.unfit
    assert all("too much" in candidate.rejected for candidate in found.rejected)


def test_a_cpu_is_one_process_with_a_moderate_micro_batch():
    candidate = chosen(plans(cpu(2)))
    assert (candidate.plan.name, candidate.plan.backend) == ("single", "gloo")
    assert candidate.plan.activation_checkpointing == "none"
    assert 2 <= candidate.plan.micro_batch <= 8
    assert 100 < candidate.estimate.tokens_per_second < 200  # 150 were measured


def test_gpus_that_do_not_divide_the_batch_stay_idle_and_it_is_said():
    machine = gpus(6)
    asked = problem(machine, LLAMA_7B)
    found = search(asked)
    assert found.fitting[0].plan.dp_replicate == 4
    assert "2 of 6 GPUs stay idle" in why(asked, found)


def test_the_smallest_of_mixed_gpus_counts():
    machine = gpus(2, gib=80)
    small = machine.gpus[0].model_copy(update={"memory_bytes": 24 * GIB})
    mixed = machine.model_copy(update={"gpus": (machine.gpus[0], small)})
    assert {c.estimate.memory_limit_bytes for c in plans(mixed)} == {int(24 * GIB * 0.9)}


def test_links_decide_whether_a_second_gpu_pays():
    near = gpus(2, gib=80)
    apart = near.model_copy(update={"links": (Link(a=0, b=1, kind="system", nvlinks=0),)})
    full, data = train_params(finetuning_type="full", global_batch=32), manifest(mean=400)
    assert chosen(plans(near, train=full, data=data)).plan.name == "ddp2"
    assert chosen(plans(apart, train=full, data=data)).plan.name == "single"


def test_an_unknown_gpu_is_guessed_and_said():
    machine = gpus(1, "NVIDIA RTX A1000", 48, (8, 6))  # its name begins like an A100's
    unknown, known = problem(machine), problem(gpus(1))
    assert "speed of NVIDIA RTX A1000 is guessed" in why(unknown, search(unknown))
    assert "guessed" not in why(known, search(known))


# --- pins ---------------------------------------------------------------------------------------


def test_pins_are_kept():
    strategy = strategy_params(
        data_parallel_degree=2,
        per_device_train_batch_size=2,
        activation_checkpointing="full",
        sharding="none",
    )
    candidates = plans(gpus(8), strategy=strategy)
    assert len(candidates) == 1
    plan = chosen(candidates).plan
    assert (plan.dp_replicate, plan.micro_batch, plan.accumulation) == (2, 2, 4)
    assert plan.activation_checkpointing == "full"


@pytest.mark.parametrize("machine", [gpus(4), cpu(4)], ids=["gpus", "cpu"])
def test_pinned_sharding_and_degree_are_shards_times_copies(machine):
    strategy = strategy_params(data_parallel_degree=4, sharding="fsdp2")
    found = [candidate.plan for candidate in plans(machine, strategy=strategy)]
    assert {(plan.dp_replicate, plan.dp_shard) for plan in found} == {(1, 4), (2, 2)}
    assert {plan.name for plan in found} == {"fsdp4", "dp2fsdp2"}
    open_to_both = {c.plan.sharding for c in plans(machine, strategy=strategy_params(data_parallel_degree=4))}
    assert open_to_both == {"none", "fsdp2"}


def test_a_model_too_large_for_a_gpu_alone_is_sharded():
    full, data = train_params(finetuning_type="full"), manifest(longest=512)
    plan = chosen(plans(gpus(4, gib=80), LLAMA_7B, train=full, data=data)).plan
    assert (plan.name, plan.engine) == ("fsdp4", "torch")
    with pytest.raises(UserError, match="no plan fits"):
        plans(gpus(4, gib=80), LLAMA_7B, train=full, data=data, strategy=strategy_params(sharding="none"))


def test_a_cpu_obeys_a_pinned_degree():
    plan = chosen(plans(cpu(2), strategy=strategy_params(data_parallel_degree=2))).plan
    assert (plan.name, plan.backend) == ("ddp2", "gloo")


def test_both_batch_pins_fix_the_degree():
    strategy = strategy_params(per_device_train_batch_size=4, gradient_accumulation_steps=2)
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
        (gpus(8), {"tensor_parallel_degree": 2}, "tensor_parallel_degree=2 cannot be trained"),
        (gpus(8), {"pipeline_parallel_degree": 4}, "pipeline_parallel_degree=4 cannot be trained"),
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


def test_gloo_may_be_asked_for_on_gpus():
    assert chosen(plans(gpus(2), strategy=strategy_params(ddp_backend="gloo"))).plan.backend == "gloo"


def test_no_rows_is_an_error():
    with pytest.raises(UserError, match="0 rows"):
        plans(cpu(2), data=manifest(rows=0))


# --- rejections ---------------------------------------------------------------------------------


def test_a_rejection_says_the_term_the_excess_and_what_fits():
    candidates = plans(gpus(1, gib=24), LLAMA_7B, data=manifest(longest=2048))
    rejected = [candidate for candidate in candidates if candidate.rejected]
    widest = max(rejected, key=lambda c: (c.plan.activation_checkpointing == "none", c.plan.micro_batch))
    assert re.fullmatch(
        r"needs [\d.]+ GiB of 21\.6 GiB in training, [\d.]+ GiB too much \(weights [\d.]+, activations [\d.]+, .*\); "
        r"fits as single, micro-batch \d+ x accumulation \d+, activation_checkpointing=full; "
        r"this plan itself would fit at prepare_data\.max_length=1024",
        widest.rejected,
    )


def test_the_nearest_plan_is_of_the_same_degree_and_checkpointing():
    candidates = fitting(plans(gpus(4), LLAMA_7B, data=manifest(longest=128)))
    target = next(
        c for c in candidates if c.plan.name == "ddp2" and c.plan.activation_checkpointing == "full"
    )
    others = [c.plan for c in candidates if c is not target]
    text = too_large(problem(gpus(4), LLAMA_7B), target.plan, target.estimate, others)
    assert "fits as ddp2" in text and text.endswith("activation_checkpointing=full")
