"""What must hold of each optimizer inside the ranks of plans; run by `ranks.run_ranks`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tasks.contracts import Plan
from tasks.params import TrainParams, read_params
from tasks.paths import Paths
from tests.distributed.claims import TOKENS, _join, _share

if TYPE_CHECKING:
    from tasks.trainer.engine import Engine

STEPS = 3
Course = list[tuple[float, float]]  # (loss, gradient norm) by step


def _train(root: Path, optim: str) -> TrainParams:
    changes: dict[str, object] = {"optim": optim, "weight_decay": 0.1}
    return read_params(root / "params.yaml").train.model_copy(update=changes)


def _engine(root: Path, plan: Plan, optim: str, precision: str) -> Engine:
    from tasks.trainer.engines import make_engine
    from tasks.trainer.loading import DTYPES, open_base

    base = open_base(Paths(root), DTYPES[precision])
    return make_engine(base, _train(root, optim), plan, precision, 10, 0)


def _steps(engine: Engine, plan: Plan, first: int) -> Course:
    results = (engine.train_step(*_share(step, plan), ()) for step in range(first, first + STEPS))
    return [(result.loss, result.grad_norm) for result in results]


def _lion(
    weights: Sequence[torch.Tensor], averages: list[torch.Tensor], rate: float, train: TrainParams
) -> None:
    """The paper's algorithm, a number after the other as it is printed (arXiv:2302.06675, algorithm 2)."""
    for weight, average in zip(weights, averages, strict=True):
        update = torch.sign(train.adam_beta1 * average + (1 - train.adam_beta1) * weight.grad)
        average.copy_(train.adam_beta2 * average + (1 - train.adam_beta2) * weight.grad)
        weight.data = weight.data - rate * (update + train.weight_decay * weight.data)


def plain_course(root: Path, optim: str, precision: str, whole: Plan) -> Course:
    """Six steps of one model in one process by no part of the engines but the schedule of rates."""
    from bitsandbytes.optim import AdamW8bit
    from transformers import AutoModelForCausalLM

    from tasks.trainer.loading import DTYPES
    from tasks.trainer.parallelize import local_device
    from tasks.trainer.step_parts import schedule_of

    train = _train(root, optim)
    model = AutoModelForCausalLM.from_pretrained(root / "model", dtype=DTYPES[precision])
    device = local_device(whole)
    model.to(device)
    weights = list(model.parameters())
    averages = [torch.zeros_like(weight) for weight in weights]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(weights, lr=train.learning_rate)  # holds Lion's rate
    if optim == "adafactor":
        optimizer = torch.optim.Adafactor(weights, lr=train.learning_rate, weight_decay=0.1)
    elif optim == "adamw_8bit":
        optimizer = AdamW8bit(weights, lr=train.learning_rate, weight_decay=0.1)
    schedule = schedule_of(optimizer, train, 10)
    course = []
    for step in range(2 * STEPS):
        batches, targets = _share(step, whole)
        ids = torch.cat([batch.input_ids for batch in batches]).to(device)
        logits = model(ids).logits[:, : TOKENS - 1]
        loss = (
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
            / targets
        )
        model.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights, train.max_grad_norm)
        if optim == "lion":
            _lion(weights, averages, schedule.get_last_lr()[0], train)
        else:
            optimizer.step()
        schedule.step()
        course.append((float(loss), float(norm)))
    return course


@dataclass(frozen=True)
class Case:
    """The first plan is of two copies."""

    optim: str
    precision: str
    plans: Mapping[str, Plan]
    within: float


def same_and_resumed(root: str, cases: Sequence[Case]) -> None:
    _join(next(iter(cases[0].plans.values())))
    for case in cases:
        _same_and_resumed(Path(root), case.optim, case.precision, case.plans, case.within)


def _same_and_resumed(
    folder: Path, optim: str, precision: str, plans: Mapping[str, Plan], within: float
) -> None:
    """Every plan takes the plain course, goes on from its own checkpoint bit for bit, and from the plan's before."""
    whole = next(iter(plans.values())).model_copy(update={"dp_replicate": 1, "accumulation": 4})
    wanted = plain_course(folder, optim, precision, whole)
    before = None
    for name, plan in plans.items():
        engine = _engine(folder, plan, optim, precision)
        _agree(wanted[:STEPS], _steps(engine, plan, 0), (optim, name), within)
        saved = folder / f"{optim}-{precision}-{name}"
        engine.save(saved)
        onward = _steps(engine, plan, STEPS)
        _agree(wanted[STEPS:], onward, (optim, name), within)
        engine.close()
        again = _engine(folder, plan, optim, precision)
        again.load(saved)
        assert _steps(again, plan, STEPS) == onward, (optim, name)
        if before is not None:
            again.load(before)  # over what it has trained meanwhile
            _agree(wanted[STEPS:], _steps(again, plan, STEPS), (optim, name, before), within)
        again.close()
        before = saved


def _agree(wanted: Course, found: Course, where: object, within: float) -> None:
    for one, other in zip(wanted, found, strict=True):
        for left, right in zip(one, other, strict=True):
            assert abs(left - right) <= within * left, (where, wanted, found)
