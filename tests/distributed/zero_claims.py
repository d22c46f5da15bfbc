"""What must hold inside the ranks of DeepSpeed's plans; run by `ranks.run_ranks`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from tasks.contracts import Plan, Precision
from tasks.params import read_params
from tasks.paths import Paths
from tests.distributed.claims import SMALL_SCALE, _join, _share

if TYPE_CHECKING:
    from tasks.trainer.engine import Engine, StepResult

STEPS = 3


def _engine(root: Path, plan: Plan, precision: Precision) -> Engine:
    from tasks.trainer.engines import make_engine
    from tasks.trainer.loading import loaded_dtype, open_base

    params = read_params(root / "params.yaml")
    base = open_base(Paths(root), loaded_dtype(params.train.finetuning_type, precision))
    return make_engine(base, params.train, plan, precision, 10, params.seed, root / "nvme")


def _steps(engine: Engine, plan: Plan, first: int) -> list[StepResult]:
    """The last of them has one micro-batch, as an epoch's short last step."""
    results = []
    for step in range(first, first + STEPS):
        batches, targets = _share(step, plan)
        if step == first + STEPS - 1:
            batches, targets = batches[:1], targets // plan.accumulation
        results.append(engine.train_step(batches, targets, (dist.get_rank() == 1, False)))
    return results


def same_and_resumed(root: str, native: Plan, plans: list[Plan], precision: Precision, within: float) -> None:
    """Each plan gives the native one's steps; its checkpoint is read by the native engine and the other way round."""
    _join(native)
    folder = Path(root)
    engine = _engine(folder, native, precision)
    wanted = _steps(engine, native, 0)
    engine.save(folder / "native")
    onward = _steps(engine, native, STEPS)
    counts = engine.parameter_counts()
    engine.close()
    for plan in plans:
        zero = _engine(folder, plan, precision)
        assert zero.parameter_counts() == counts
        _agree(wanted, _steps(zero, plan, 0), plan, within)
        saved = folder / plan.name.replace("+", "-")
        zero.save(saved)
        _agree(onward, _steps(zero, plan, STEPS), plan, within)
        zero.load(folder / "native")  # over what it has trained meanwhile
        _agree(onward, _steps(zero, plan, STEPS), plan, within)
        zero.close()
        again = _engine(folder, native, precision)
        again.load(saved)
        _agree(onward, _steps(again, native, STEPS), plan, within)
        again.close()


def _agree(wanted: list[StepResult], found: list[StepResult], plan: Plan, within: float) -> None:
    for one, other in zip(wanted, found, strict=True):
        assert abs(one.loss - other.loss) <= within * one.loss, (plan.name, one, other)
        assert abs(one.grad_norm - other.grad_norm) <= within * one.grad_norm, (plan.name, one, other)
        assert (one.learning_rate, one.skipped, one.flags) == (
            other.learning_rate,
            other.skipped,
            other.flags,
        )
        assert other.flags == (True, False)


def skip_together(root: str, plans: list[Plan]) -> None:
    """float16: a step that overflows is taken by no rank, halves the scale and moves nothing; the next one is taken."""
    from tasks.trainer.deepspeed_engine import DeepSpeedEngine

    _join(plans[0])
    for plan in plans:
        engine = _engine(Path(root), plan, "float16")
        assert isinstance(engine, DeepSpeedEngine)
        engine.loss_scale.scale = 2.0**120
        before = [engine.state.flat(piece.group).clone() for piece in engine.state.fragments]
        skipped = engine.train_step(*_share(0, plan), ())
        assert skipped.skipped and engine.loss_scale.scale == 2.0**119, plan.name
        after = [engine.state.flat(piece.group) for piece in engine.state.fragments]
        assert all(bool((one == other).all()) for one, other in zip(before, after, strict=True)), plan.name
        engine.loss_scale.scale = SMALL_SCALE
        taken = engine.train_step(*_share(0, plan), ())
        assert not taken.skipped and 0 < taken.grad_norm < 100, plan.name
        after = [engine.state.flat(piece.group) for piece in engine.state.fragments]
        assert any(bool((one != other).any()) for one, other in zip(before, after, strict=True)), plan.name
        engine.close()
