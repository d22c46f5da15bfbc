"""What engines do alike: schedule and loss scale of a checkpoint, clipping, the export, what they count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from tasks.contracts import Precision
from tasks.params import TrainParams
from tasks.trainer import training_state
from tasks.trainer.clock import StepClock
from tasks.trainer.loss_scale import LossScale


class EngineBase:
    """Base of the engines. `outline` is the whole model without its numbers; `parameters` counts (trainable, all)."""

    train: TrainParams
    precision: Precision
    outline: torch.nn.Module
    parameters: tuple[int, int]
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    loss_scale: LossScale
    step_clock: StepClock

    def clipped(self, gradients: Sequence[torch.Tensor], squares: torch.Tensor) -> torch.Tensor:
        """Takes the loss's scale out of `gradients` and clips them, in place; gives their norm.

        Args:
            squares: the sum of the squares of all gradients, this rank's or not, with the scale in them.
        """
        norm = squares.sqrt() / self.loss_scale.value
        factor = (self.train.max_grad_norm / (norm + 1e-6)).clamp(max=1.0) / self.loss_scale.value
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
        return norm

    def small_state(self) -> dict[str, Any]:
        """What a checkpoint holds beside tensors by parameter name."""
        return {"schedule": self.schedule.state_dict(), "scaler": self.loss_scale.state_dict()}

    def take_small_state(self, state: Mapping[str, Any]) -> None:
        """After a load: schedule, the optimizer's rates, and the loss scale are those of the checkpoint."""
        self.schedule.load_state_dict(state["schedule"])
        for group, rate in zip(self.optimizer.param_groups, self.schedule.get_last_lr(), strict=True):
            group["lr"] = rate
        self.loss_scale.load_state_dict(state["scaler"])

    def export(self, folder: Path, checkpoint: Path) -> None:
        """See `Engine.export`."""
        if dist.get_rank() == 0:
            training_state.export(self.outline, self.train, self.precision, checkpoint, folder)

    def parameter_counts(self) -> tuple[int, int]:
        return self.parameters

    def clock(self) -> dict[str, float]:
        return dict(self.step_clock.totals)
