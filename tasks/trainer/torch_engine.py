"""The native engine: torch modules, AdamW, one process, DDP or FSDP2."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel, get_scheduler

from tasks.contracts import Plan, Precision
from tasks.params import TrainParams
from tasks.trainer.clock import StepClock
from tasks.trainer.engine import Batch, StepResult
from tasks.trainer.loading import DTYPES
from tasks.trainer.parallelize import local_device, parallelize

OPTIONS = StateDictOptions(ignore_frozen_params=True)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor put together on every rank (collective), or the tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class TorchEngine:
    """Implements `Engine` for plans over torch's own data parallelism."""

    def __init__(
        self,
        base: PreTrainedModel,
        train: TrainParams,
        plan: Plan,
        precision: Precision,
        total_steps: int,
        seed: int,
    ) -> None:
        self.train, self.plan, self.precision = train, plan, precision
        self.device = local_device(plan)
        # Sharded tensors are batched on a GPU only if asked for; a CPU has no such kernels.
        self._foreach = True if plan.device == "cuda" else None
        parts = parallelize(base, train, plan, precision, seed)
        self.module, self.model = parts.module, parts.model
        self.trainable = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.trainable,
            lr=train.learning_rate,
            betas=(train.adam_beta1, train.adam_beta2),
            eps=train.adam_epsilon,
            weight_decay=train.weight_decay,
            fused=plan.device == "cuda",
        )
        self.schedule = get_scheduler(
            train.lr_scheduler_type,
            self.optimizer,
            num_warmup_steps=round(train.warmup_ratio * total_steps),
            num_training_steps=total_steps + 1,
        )
        # transformers' schedules begin at rate zero, which would waste the first step: begin one later.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
            self.schedule.step()
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "float16")
        self.step_clock = StepClock(self.module, plan.device == "cuda")

    def train_step(self, batches: Sequence[Batch], target_tokens: int, flags: Sequence[bool]) -> StepResult:
        """See `Engine.train_step`. DDP and FSDP2 average over data ranks, hence the factor of the degree."""
        self.step_clock.start()
        self.optimizer.zero_grad(set_to_none=True)
        scale = self.plan.data_parallel / target_tokens
        summed = torch.zeros((), dtype=torch.float64, device=self.device)
        for index, batch in enumerate(batches):
            with self._reduce_after(index == len(batches) - 1):
                loss = self._loss_sum(batch)
                self.scaler.scale(loss * scale).backward()
            summed += loss.detach().double()
        self.step_clock.reduced()
        self.scaler.unscale_(self.optimizer)
        norm = whole(
            torch.nn.utils.clip_grad_norm_(self.trainable, self.train.max_grad_norm, foreach=self._foreach)
        )
        scale_before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        rate = float(self.schedule.get_last_lr()[0])
        self.schedule.step()
        told = self._tell(summed / target_tokens, flags)
        result = StepResult(
            loss=told[0],
            grad_norm=float(norm),
            learning_rate=rate,
            skipped=self.scaler.get_scale() < scale_before,
            flags=tuple(value > 0 for value in told[1:]),
        )
        self.step_clock.stop()
        return result

    def _reduce_after(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Gradients are reduced after a step's last micro-batch, as far as memory allows.

        FSDP2 would have to keep unreduced gradients whole. For adapters these are small; of all weights they are not,
        so full tuning scatters them each micro-batch, and only the sum over copies of the shards waits.
        """
        if isinstance(self.module, FSDPModule):
            # In this order: the first sets what the second does, too.
            self.module.set_requires_gradient_sync(last or self.train.finetuning_type == "full")
            self.module.set_requires_all_reduce(last)
        elif isinstance(self.module, DistributedDataParallel) and not last:
            return self.module.no_sync()
        return contextlib.nullcontext()

    def _loss_sum(self, batch: Batch) -> torch.Tensor:
        ids = batch.input_ids.to(self.device, non_blocking=True)
        labels = batch.labels.to(self.device, non_blocking=True)
        mixed = self.precision != "float32"
        with torch.autocast(self.device.type, DTYPES[self.precision], enabled=mixed):
            return self.module(ids, labels)

    def _tell(self, loss: torch.Tensor, flags: Sequence[bool]) -> list[float]:
        """Sums loss shares and flags over ranks in one small all-reduce."""
        told = torch.cat([loss.reshape(1), loss.new_tensor([float(flag) for flag in flags])])
        if self.plan.data_parallel > 1:
            dist.all_reduce(told)
        return [float(value) for value in told.tolist()]

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=OPTIONS)
        return {
            "model": model,
            "optimizer": optimizer,
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def save(self, folder: Path) -> None:
        """Trainable weights and optimizer state by parameter name, through torch's distributed checkpoint."""
        dcp.save(self._state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(ignore_frozen_params=True, strict=False),
        )
        self.schedule.load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state["scaler"])

    def export(self, folder: Path) -> None:
        """Adapter or whole weights as safetensors; full weights in the precision of the run."""
        weights = self._weights()
        if dist.get_rank() != 0:
            return
        self.model.save_pretrained(folder, state_dict=weights)
        (folder / "README.md").unlink(missing_ok=True)

    def _weights(self) -> dict[str, torch.Tensor]:
        """Rank 0: what export writes, on the CPU; tied weights stay one tensor. Collective where weights are sharded.

        Shards are put together one parameter at a time, so a device holds one whole parameter beside its shards.
        """
        full, first = self.train.finetuning_type == "full", dist.get_rank() == 0
        gathered: dict[int, torch.Tensor] = {}
        named: dict[str, torch.Tensor] = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            if not full and not value.requires_grad:
                continue
            if id(value) not in gathered:
                one = whole(value.detach())
                if first:
                    one = one.to(DTYPES[self.precision] if full else one.dtype).cpu()
                gathered[id(value)] = one if first else one.new_empty(0)
            named[name] = gathered[id(value)]
        return named

    def parameter_counts(self) -> tuple[int, int]:
        every = list(self.model.parameters())
        return sum(weight.numel() for weight in self.trainable), sum(weight.numel() for weight in every)

    def clock(self) -> dict[str, float]:
        return dict(self.step_clock.totals)

    def close(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
