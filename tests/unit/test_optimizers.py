"""The table of optimizers: what is learned by each, what it needs, and where it may run."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.optim import Lion as OtherLion

from tasks.errors import UserError
from tasks.optimizers import BLOCK, OPTIMIZERS
from tasks.planner.capabilities import EVERYTHING
from tasks.planner.hardware_names import named_hardware
from tasks.planner.host_memory import host_memory
from tasks.planner.machine import machine
from tasks.planner.memory import memory
from tasks.planner.model_spec import model_spec
from tasks.planner.nearest import NothingFits
from tasks.planner.problem import Pins, Problem
from tasks.planner.search import search
from tasks.planner.time import seconds
from tasks.planner.workload import Workload
from tasks.trainer import optimizers
from tasks.trainer.optimizers import Lion, fill, fresh_state, make_optimizer
from tests import tiny
from tests.unit.published_configs import published

SPEC = model_spec(published("qwen2.5-7b"))
NODE = named_hardware("4xA100-80G")


def work(optim: str, method: str = "full") -> Workload:
    return Workload(method, "bfloat16", 1024, 1024.0, optim=optim)


# --- Lion ---------------------------------------------------------------------------------------


def moved(kind, steps: int = 5, shapes=((7, 5), (11,), (3, 4, 2)), decay: float = 0.1) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    weights = [torch.nn.Parameter(torch.randn(shape, generator=draw)) for shape in shapes]
    optimizer = kind(weights, lr=0.01, betas=(0.9, 0.98), weight_decay=decay)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=draw)
        optimizer.step()
    return [weight.detach() for weight in weights]


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lion_is_that_of_bitsandbytes(decay: float) -> None:
    for ours, theirs in zip(moved(Lion, decay=decay), moved(OtherLion, decay=decay), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_buckets_change_nothing(monkeypatch) -> None:
    whole = moved(Lion)
    monkeypatch.setattr(optimizers, "BUCKET", 4)
    for one, other in zip(whole, moved(Lion), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_lion_leaves_what_has_no_gradient_and_takes_any_layout() -> None:
    base = torch.arange(12.0).view(3, 4)
    turned, idle = torch.nn.Parameter(base.clone().t()), torch.nn.Parameter(torch.ones(2))
    empty = torch.nn.Parameter(torch.zeros(0, 3))
    turned.grad, empty.grad = torch.full((4, 3), -2.0), torch.zeros(0, 3)
    Lion([turned, idle, empty], lr=0.5, betas=(0.9, 0.99), weight_decay=0.0).step()
    assert torch.equal(turned.detach(), base.t() + 0.5) and torch.equal(idle.detach(), torch.ones(2))


# --- state --------------------------------------------------------------------------------------


@pytest.mark.parametrize("optim", list(OPTIMIZERS))
def test_state_is_as_large_as_the_table_says_and_filling_takes_no_step(optim: str) -> None:
    train = tiny.params(**{"train.optim": optim}).train
    start = torch.randn(96, 64, generator=torch.Generator().manual_seed(2))
    gradient = torch.randn(96, 64, generator=torch.Generator().manual_seed(3))
    filled, fresh = (torch.nn.Parameter(start.clone()) for _ in range(2))
    ready, other = (make_optimizer(train, [weight], fused=False) for weight in (filled, fresh))
    fill(ready)
    assert torch.equal(filled.detach(), start) and filled.grad is None
    assert ready.param_groups[0]["lr"] == train.learning_rate
    held = sum(
        value.numel() * value.element_size()
        for key, value in ready.state[filled].items()
        if isinstance(value, torch.Tensor) and value.dim() and not key.startswith("qmap")
    )
    needs = OPTIMIZERS[optim]
    numbers = 96 + 64 if needs.unit == "matrix" else 96 * 64
    assert held == needs.state * numbers
    for weight, optimizer in ((filled, ready), (fresh, other)):
        weight.grad = gradient.clone()
        optimizer.step()
    assert torch.equal(filled.detach(), fresh.detach()) and not torch.equal(filled.detach(), start)


@pytest.mark.parametrize("optim", [name for name, needs in OPTIMIZERS.items() if needs.any_cut])
def test_a_fresh_state_is_that_of_the_first_step(optim: str) -> None:
    train = tiny.params(**{"train.optim": optim}).train
    flat = torch.nn.Parameter(torch.randn(50, generator=torch.Generator().manual_seed(2)))
    optimizer = make_optimizer(train, [flat], fused=True)
    wanted, fresh = make_optimizer(train, [flat], fused=True), fresh_state(optimizer, flat)
    assert not optimizer.state and optimizer.param_groups[0]["params"][0] is flat
    fill(wanted)
    assert fresh.keys() == wanted.state[flat].keys()
    for key, value in wanted.state[flat].items():
        assert torch.equal(fresh[key], value) and fresh[key].dtype == value.dtype


# --- params -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optim", "key", "value"),
    [("lion", "adam_epsilon", 1e-6), ("adafactor", "adam_beta1", 0.95), ("adafactor", "adam_beta2", 0.95)],
)
def test_a_key_that_is_not_read_may_not_say_anything(optim: str, key: str, value: float) -> None:
    with pytest.raises(
        UserError, match=f"train.{key}={value:g} is not read by train.optim={optim}; set it back"
    ):
        tiny.params(**{"train.optim": optim, f"train.{key}": value})
    assert tiny.params(**{"train.optim": "adamw_8bit", f"train.{key}": value}).train.optim == "adamw_8bit"


# --- plans --------------------------------------------------------------------------------------


@pytest.mark.parametrize("optim", ["adafactor", "adamw_8bit"])
def test_what_needs_whole_parameters_is_planned_where_they_are(optim: str) -> None:
    found = search(Problem(SPEC, NODE, work(optim, "lora"), 32, EVERYTHING))
    plans = [each.plan for each in (*found.fitting, *found.rejected)]
    assert plans and all(plan.tp == 1 and plan.sharding in ("none", "zero0") for plan in plans)
    freer = search(Problem(SPEC, NODE, work("lion", "lora"), 32, EVERYTHING))
    assert {each.plan.sharding for each in (*freer.fitting, *freer.rejected)} > {"none"}


@pytest.mark.parametrize(
    ("optim", "pins", "said"),
    [
        (
            "adafactor",
            {"sharding": "fsdp2"},
            "keeps its state by rows and columns .*fsdp.* cuts parameters; use tp=1",
        ),
        ("adamw_8bit", {"tp": 2}, "keeps its state by blocks of 256 numbers .* cuts parameters; use tp=1"),
        (
            "adamw_8bit",
            {"offload": "cpu"},
            "offload=cpu shares parameters out .*; use train.optim=adamw_torch or lion",
        ),
        (
            "adafactor",
            {"offload": "nvme"},
            "offload=nvme shares parameters out .*; use train.optim=adamw_torch or",
        ),
    ],
)
def test_a_plan_that_would_change_what_is_learned_is_refused(optim: str, pins: dict, said: str) -> None:
    with pytest.raises(UserError, match=f"train.optim={optim} {said}" if "offload" not in said else said):
        search(Problem(SPEC, NODE, work(optim), 32, EVERYTHING, Pins(**pins)))


def test_where_only_a_shared_state_fits_another_optimizer_is_named() -> None:
    card = named_hardware("A100-40G").model_copy(update={"host_memory_bytes": 512 * 2**30})
    small = Problem(SPEC, card, work("adafactor"), 64, EVERYTHING)
    with pytest.raises(NothingFits, match=r"set train\.optim=adamw_torch, which fits as"):
        search(small)


def test_memory_and_time_follow_the_table() -> None:
    plan = tiny.cpu_plan(device="cuda", backend="nccl")
    state = {optim: memory(SPEC, plan, work(optim))["optimizer"] for optim in OPTIMIZERS}
    assert state["adamw_torch"] == 2 * state["lion"] == pytest.approx(8 * SPEC.parameters)
    assert state["adamw_8bit"] == pytest.approx((2 + 8 / BLOCK) * SPEC.parameters)
    assert 0 < state["adafactor"] < 0.01 * state["lion"]
    node = machine(NODE, "bfloat16")
    step = {optim: seconds(SPEC, plan, work(optim), node)["optimizer"] for optim in OPTIMIZERS}
    assert step["adamw_8bit"] < step["adamw_torch"] < step["lion"] < step["adafactor"]
    zero = plan.model_copy(update={"engine": "deepspeed", "sharding": "zero3", "offload": "cpu"})
    host = {
        optim: host_memory(SPEC, zero, work(optim), node)["optimizer"] for optim in ("adamw_torch", "lion")
    }
    assert host["adamw_torch"] - host["lion"] == pytest.approx(4 * SPEC.parameters)
