"""What a step needs under every engine: the schedule of rates, rows on a device, and one small sum over ranks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from tasks.contracts import Plan
from tasks.params import TrainParams
from tasks.trainer.engine import Batch
from tasks.trainer.isolation import documents_of
from tasks.trainer.loss import learnt_positions


def schedule_of(optimizer: torch.optim.Optimizer, train: TrainParams, total_steps: int) -> LRScheduler:
    """transformers' schedule, one step ahead: theirs begin at rate zero, which would waste the first step."""
    schedule = get_scheduler(
        train.lr_scheduler_type,
        optimizer,
        num_warmup_steps=round(train.warmup_ratio * total_steps),
        num_training_steps=total_steps + 1,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
        schedule.step()
    return schedule


def sent_to(batch: Batch, device: torch.device) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """What `TokenLossSum` is called with for a micro-batch: token ids, labels and where is learnt, on the device; and
    documents, if rows are packed.
    """
    tensors = (batch.input_ids, batch.labels, learnt_positions(batch.labels))
    packed = {} if batch.positions is None else {"documents": documents_of(batch.positions, device)}
    return tuple(tensor.to(device, non_blocking=True) for tensor in tensors), packed


def tell(loss: torch.Tensor, flags: Sequence[bool], plan: Plan) -> tuple[float, tuple[bool, ...]]:
    """The step's loss and the union of all ranks' flags, by one small all-reduce.

    Args:
        loss: this rank's share, a float64 scalar. Ranks of one slice group have the same, and of a pipeline only the
            last stage has one at all.
    """
    told = torch.cat([loss.reshape(1), loss.new_tensor([float(flag) for flag in flags])])
    if plan.processes > 1:
        dist.all_reduce(told)
    told[0] /= plan.tp
    values = told.tolist()
    return float(values[0]), tuple(value > 0 for value in values[1:])
