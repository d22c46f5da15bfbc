"""The engine that a plan asks for."""

from __future__ import annotations

from pathlib import Path

from tasks.contracts import Plan, Precision
from tasks.params import TrainParams
from tasks.trainer.engine import Engine
from tasks.trainer.weights import MetaModel


def make_engine(
    base: MetaModel,
    train: TrainParams,
    plan: Plan,
    precision: Precision,
    total_steps: int,
    seed: int,
    swap: Path | None = None,
) -> Engine:
    """Collective over the plan's ranks. `swap` is a folder on NVMe, for plans that keep states there."""
    if plan.engine == "deepspeed":
        from tasks.trainer.deepspeed_engine import DeepSpeedEngine

        return DeepSpeedEngine(base, train, plan, precision, total_steps, seed, swap)
    from tasks.trainer.torch_engine import TorchEngine

    return TorchEngine(base, train, plan, precision, total_steps, seed)
