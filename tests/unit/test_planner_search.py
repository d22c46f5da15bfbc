"""Which plans are legal, which is chosen, and what is said of the others."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tasks.contracts import Link
from tasks.errors import UserError
from tasks.planner.capabilities import EVERYTHING, TRAINABLE_NOW
from tasks.planner.explain import why
from tasks.planner.hardware_names import named_hardware
from tasks.planner.model_spec import model_spec
from tasks.planner.nearest import NothingFits, too_large
from tasks.planner.problem import Pins
from tasks.planner.search import KEPT, search
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
NO_DISK = replace(TRAINABLE_NOW, disk=False)


# --- choices ------------------------------------------------------------------------------------


def test_eight_a100_40g_train_lora_7b_as_ddp8():
    candidate = chosen(plans(gpus(8), LLAMA_7B, data=manifest(mean=400, longest=1024)))
    assert candidate.plan.name == "ddp8"
    assert candidate.plan.backend == "nccl"
    assert candidate.plan.global_batch == 16


def test_full_7b_on_24_gb_is_refused_with_numbers_and_the_way_out():
    machine = gpus(1, "NVIDIA GeForce RTX 4090", 24, (8, 9))
    with pytest.raises(UserError) as caught:
        plans(machine, LLAMA_7B, train_params(finetuning_type="full"), capabilities=NO_DISK)
    text = str(caught.value)
    need, limit = map(float, re.search(r"needs ([\d.]+) GiB of ([\d.]+) GiB", text).groups())
    assert limit == pytest.approx(24 * 0.9, abs=0.1)
    assert need > 16 * LLAMA_7B.parameters / GIB
    assert "micro-batch 1" in text and "activation_checkpointing=full" in text
    assert "set train.finetuning_type=lora, which fits" in text
    room = int(
        re.search(r"give the node (\d+) GiB of host memory, which fits as zero3dp1\+cpu\+params-cpu", text)[1]
    )
    larger = machine.model_copy(update={"host_memory_bytes": room * GIB})
    smaller = machine.model_copy(update={"host_memory_bytes": (room - 1) * GIB})
    full = train_params(finetuning_type="full")
    assert chosen(plans(larger, LLAMA_7B, full)).plan.offload_parameters == "cpu"
    with pytest.raises(NothingFits):
        plans(smaller, LLAMA_7B, full, capabilities=NO_DISK)
    # A disk does with less of it, and is slow.
    on_disk = chosen(plans(machine, LLAMA_7B, full))
    assert on_disk.plan.name == "zero3dp1+nvme+params-nvme" and on_disk.estimate.tokens_per_second < 20


def test_a_7b_model_is_tuned_on_one_24_gb_card_with_its_states_in_host_memory():
    machine = named_hardware("RTX4090").model_copy(update={"host_memory_bytes": 256 * GIB})
    asked = problem(machine, LLAMA_7B, train_params(finetuning_type="full"))
    found = search(asked)
    assert {candidate.plan.name for candidate in found.fitting} == {"zero3dp1+cpu+params-cpu"}
    cost = found.fitting[0].estimate
    # Weights, two moments, gradients twice and weights to be sent, in float32; parts of it rounded up when pinned.
    states = 24 * LLAMA_7B.parameters
    assert states < sum(cost.host_bytes.values()) < 1.25 * states
    moved = 48 * LLAMA_7B.parameters / 20e9  # bytes that the step moves at the host memory's assumed rate
    assert moved < cost.seconds["optimizer"] < 1.5 * moved
    assert cost.tokens_per_second == pytest.approx(16 * 100 / cost.total_seconds)
    assert re.search(
        r"of 21\.2 GiB a process and 1\d\d\.\d of 230\.4 GiB host memory a node, best", why(asked, found)
    )


def test_nothing_helps_names_length_and_model():
    with pytest.raises(UserError, match=r"smaller model.*prepare_data\.max_length.*512 tokens"):
        plans(gpus(1, gib=3), GEMMA)


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
    asked = problem(machine, LLAMA_7B, strategy=strategy_params(**WHOLE))
    found = search(asked)
    assert found.fitting[0].plan.dp_replicate == 4
    assert "2 of 6 GPUs stay idle" in why(asked, found)


def test_the_smallest_of_mixed_gpus_counts():
    machine = gpus(2, gib=80)
    small = machine.gpus[0].model_copy(update={"memory_bytes": 24 * GIB})
    mixed = machine.model_copy(update={"gpus": (machine.gpus[0], small)})
    limits = {c.estimate.memory_limit_bytes for c in plans(mixed) if c.estimate is not None}
    assert limits == {int(24 * GIB * 0.9)}


def test_links_decide_whether_a_second_gpu_pays():
    near = gpus(2, gib=80)
    apart = near.model_copy(update={"links": (Link(a=0, b=1, kind="system", nvlinks=0),)})
    full, data = train_params(finetuning_type="full", global_batch=16), manifest(mean=200)
    whole = strategy_params(**WHOLE)
    assert chosen(plans(near, train=full, data=data, strategy=whole)).plan.name == "ddp2"
    assert chosen(plans(apart, train=full, data=data, strategy=whole)).plan.name == "single"


def test_an_unknown_gpu_is_guessed_and_said():
    machine = gpus(1, "NVIDIA RTX A1000", 48, (8, 6))  # its name begins like an A100's
    unknown, known = problem(machine), problem(gpus(1))
    assert "speed of NVIDIA RTX A1000 is guessed" in why(unknown, search(unknown))
    assert "guessed" not in why(known, search(known))


def test_no_rows_is_an_error():
    with pytest.raises(UserError, match="0 rows"):
        plans(cpu(2), data=manifest(rows=0))


# --- compiling ----------------------------------------------------------------------------------


def compiled(steps: int | None, compile: object = "auto", machine=None) -> set[bool]:
    asked = problem(machine or gpus(2, gib=80), TINY, strategy=strategy_params(compile=compile))
    found = search(asked.changed(steps=steps)).fitting
    assert not any(candidate.plan.compiled for candidate in found if candidate.plan.engine == "deepspeed")
    return {candidate.plan.compiled for candidate in found if candidate.plan.engine == "torch"}


def test_layers_are_compiled_where_the_run_is_long_enough():
    assert compiled(None) == compiled(5) == {False}
    assert compiled(1_000_000) == {True}
    assert compiled(5, compile=True) == {True} and compiled(1_000_000, compile=False) == {False}
    assert compiled(1_000_000, machine=cpu(2)) == {False}
    pascal = gpus(1, "Tesla P100-PCIE-16GB", 16, (6, 0))
    assert compiled(1_000_000, machine=pascal) == {False}
    with pytest.raises(
        UserError, match=r"compute capability 6.0, and compiled kernels need 7.0; use compile"
    ):
        compiled(1_000_000, compile=True, machine=pascal)


def test_a_plan_that_only_fits_compiled_is_compiled_if_that_pays():
    torch_alone = strategy_params(engine="torch")
    asked = problem(gpus(1, gib=40), LLAMA_7B, strategy=torch_alone, data=manifest(longest=1024))
    widest = {
        steps: max(
            candidate.plan.micro_batch
            for candidate in search(asked.changed(steps=steps)).fitting
            if candidate.plan.activation_checkpointing == "none"
        )
        for steps in (1_000_000, None)
    }
    assert widest[1_000_000] > widest[None]


def test_what_compiling_saves_is_more_than_it_takes():
    asked = problem(gpus(1, gib=80), TINY, strategy=strategy_params(per_device_train_batch_size=4))
    plain = search(asked.changed(steps=None)).fitting[0]
    with_compiled = asked.cost.estimate(plain.plan.model_copy(update={"compiled": True}))
    even = 90 / (plain.estimate.total_seconds - with_compiled.total_seconds)
    assert not search(asked.changed(steps=int(even * 0.99))).fitting[0].plan.compiled
    longer = asked.changed(steps=int(even * 1.2))
    found = search(longer)
    assert found.fitting[0].plan.compiled
    assert re.search(r"Compiling takes about 90 s and saves 10\d s over [\d,]+ steps", why(longer, found))


# --- rejections ---------------------------------------------------------------------------------


def test_a_rejection_says_the_term_the_excess_and_what_fits():
    plain = strategy_params(compile=False)
    candidates = plans(gpus(1, gib=24), LLAMA_7B, strategy=plain, data=manifest(longest=2048))
    rejected = [c for c in candidates if c.rejected and c.plan.name == "single"]
    widest = max(rejected, key=lambda c: (c.plan.activation_checkpointing == "none", c.plan.micro_batch))
    assert re.fullmatch(
        r"needs [\d.]+ GiB of 21\.6 GiB in training, [\d.]+ GiB too much \(weights [\d.]+, activations [\d.]+, .*\); "
        r"fits as single, micro-batch \d+ x accumulation \d+, activation_checkpointing=selective; "
        r"this plan itself would fit with qlora, or at prepare_data\.max_length=1024",
        widest.rejected,
    )


def test_the_nearest_plan_is_of_the_same_degree_and_checkpointing():
    plain = strategy_params(compile=False, **WHOLE)
    candidates = fitting(plans(gpus(4), LLAMA_7B, strategy=plain, data=manifest(longest=128)))
    target = next(
        c for c in candidates if c.plan.name == "ddp2" and c.plan.activation_checkpointing == "full"
    )
    others = [c.plan for c in candidates if c is not target]
    text = too_large(problem(gpus(4), LLAMA_7B), target.plan, target.estimate, others)
    assert "fits as ddp2" in text and text.endswith("activation_checkpointing=full")
