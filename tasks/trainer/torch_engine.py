"""The native engine: torch modules over one device mesh of copies, shards, slices and stages."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from tasks.contracts import Plan, Precision
from tasks.params import TrainParams
from tasks.trainer import training_state
from tasks.trainer.clock import StepClock
from tasks.trainer.comm_hooks import PowerSgd, communication_hook
from tasks.trainer.data_parallel import DataParallel
from tasks.trainer.engine import Batch, StepResult
from tasks.trainer.engine_base import EngineBase
from tasks.trainer.loss_scale import LossScale
from tasks.trainer.mesh import first_and_last_stage, group_over
from tasks.trainer.optimizers import fill, make_optimizer
from tasks.trainer.parallelize import local_device, parallelize
from tasks.trainer.pieces import local, squared_norm, sum_gradients
from tasks.trainer.step_parts import schedule_of, sent_to, tell
from tasks.trainer.weights import MetaModel


class TorchEngine(EngineBase):
    """Implements `Engine` for every plan of the engine torch."""

    def __init__(
        self,
        base: MetaModel,
        train: TrainParams,
        plan: Plan,
        precision: Precision,
        total_steps: int,
        seed: int,
    ) -> None:
        self.train, self.plan, self.precision = train, plan, precision
        self.device = local_device(plan)
        parts = parallelize(base, train, plan, precision, seed)
        self.modules, self.model, self.pipeline = parts.modules, parts.model, parts.pipeline
        self.outline, self.pieces, self.parameters = parts.outline, parts.pieces, parts.parameters
        self.trainable = [piece.weight for piece in self.pieces]
        self._groups(parts.mesh)
        self.optimizer = make_optimizer(train, self.trainable, fused=plan.device == "cuda")
        self.schedule = schedule_of(self.optimizer, train, total_steps)
        self.loss_scale = LossScale(enabled=precision == "float16")
        self._hook = self._hook_of_ddp()
        self.step_clock = StepClock(self.modules, plan.device == "cuda", self._hook)
        if self.pipeline is not None:
            self.pipeline.watch = self.step_clock.watch_stages

    def _groups(self, mesh: Any) -> None:
        """Who sums gradients with whom, beside what DDP and FSDP2 do themselves. Collective."""
        plan = self.plan
        self._copy = group_over(plan, "dp_shard", "tp", "pp")  # the ranks of one copy of the model
        # DDP averages over data ranks, FSDP2 is told to sum, and copies of models that are cut otherwise are summed
        # below.
        whole = plan.tp == 1 and plan.pp == 1 and plan.sharding == "none"
        self._averaged = plan.shares if whole else 1
        cut = not whole and plan.sharding == "none"
        self._replicas = mesh.get_group("dp_replicate") if cut and plan.dp_replicate > 1 else None
        self._slices = mesh.get_group("tp") if plan.tp > 1 else None
        self._ends = first_and_last_stage(plan) if plan.pp > 1 and plan.schedule != "zerobubble" else None

    def _hook_of_ddp(self) -> tuple[Any, Any] | None:
        module = self.modules[0]
        if not isinstance(module, DistributedDataParallel):
            return None
        return communication_hook(self.train.communication_hook, module.process_group)

    # --- a step ---------------------------------------------------------------------------------

    def train_step(self, batches: Sequence[Batch], target_tokens: int, flags: Sequence[bool]) -> StepResult:
        """See `Engine.train_step`."""
        self.step_clock.start()
        self.optimizer.zero_grad(set_to_none=True)
        summed = self._passes(batches, self.loss_scale.value * self._averaged / target_tokens)
        self.step_clock.reduced()
        self._complete_gradients()
        norm = self._clip()
        finite = not self.loss_scale.enabled or bool(norm.isfinite())
        if finite:
            self.optimizer.step()
        self.loss_scale.update(finite)
        rate = float(self.schedule.get_last_lr()[0])
        self.schedule.step()
        loss, told = tell(summed / target_tokens, flags, self.plan)
        result = StepResult(
            loss=loss, grad_norm=float(norm), learning_rate=rate, skipped=not finite, flags=told
        )
        self.step_clock.stop()
        return result

    def _passes(self, batches: Sequence[Batch], factor: float) -> torch.Tensor:
        """Forward and backward of this rank's micro-batches; the sum of their losses, as far as it is known here."""
        multiple = self.plan.tp if self.plan.sequence_parallel else 1
        if self.pipeline is not None:
            longest = max(batch.input_ids.shape[1] for batch in batches)
            missing = self.plan.accumulation - len(batches)  # in an epoch's short last step
            filled = [*batches, *(batches[0].unlearnt() for _ in range(missing))]
            even = [batch.padded(self.plan.micro_batch, longest, multiple) for batch in filled]
            return self.pipeline.run(even, factor)
        summed = torch.zeros((), dtype=torch.float64, device=self.device)
        for index, batch in enumerate(batches):
            with self._reduce_after(index == len(batches) - 1):
                loss = self._loss_sum(batch.padded(0, 0, multiple))
                (loss * factor).backward()
            summed += loss.detach().double()
        return summed

    def _reduce_after(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Gradients are reduced after a step's last micro-batch, as far as memory allows.

        FSDP2 would have to keep unreduced gradients whole. For adapters these are small; of all weights they are not,
        so full tuning scatters them each micro-batch, and only the sum over copies of the shards waits.
        """
        module = self.modules[0]
        if isinstance(module, FSDPModule):
            # In this order: the first sets what the second does, too.
            large = self.train.finetuning_type == "full" or self.train.lora.train_embeddings
            module.set_requires_gradient_sync(last or large)
            module.set_requires_all_reduce(last)
        elif isinstance(module, DistributedDataParallel) and not last:
            return module.no_sync()
        return contextlib.nullcontext()

    def _loss_sum(self, batch: Batch) -> torch.Tensor:
        if isinstance(self.modules[0], DataParallel):
            return self.modules[0](batch)
        tensors, told = sent_to(batch, self.device)
        return self.modules[0](*tensors, **told)

    def _complete_gradients(self) -> None:
        """The sums over ranks and stages that no wrapper has made."""
        if self._slices is not None:
            sum_gradients([piece.weight for piece in self.pieces if piece.summed], self._slices)
            self.step_clock.mark("communication")
        self._sum_tied()
        if self._ends is not None:
            self.step_clock.mark("pipeline_wait")  # stages end at different times, and these two meet here
        if self._replicas is not None:
            sum_gradients(self.trainable, self._replicas)
            self.step_clock.mark("communication")

    def _sum_tied(self) -> None:
        """A table at both ends of a pipeline has the sum of both gradients at both."""
        here = training_state.twins(self.pieces)
        for first, second in here:
            first.weight.grad = first.weight.grad + second.weight.grad
            second.weight.grad = first.weight.grad.clone()
        if self._ends is not None:
            tied = [piece.weight for piece in self.pieces if piece.tied]
            sum_gradients(tied, self._ends)

    def _clip(self) -> torch.Tensor:
        """Takes the loss's scale out of the gradients and clips them by their one norm over all parameters."""
        squares = squared_norm(self.pieces, self.device)
        if self._copy is not None:
            self.step_clock.mark("optimizer")
            dist.all_reduce(squares, group=self._copy)
            self.step_clock.mark("communication" if self.plan.pp == 1 else "pipeline_wait")
        return self.clipped(
            [local(weight.grad) for weight in self.trainable if weight.grad is not None], squares
        )

    # --- state ----------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Trainable weights and optimizer state by parameter name, through torch's distributed checkpoint."""
        fill(self.optimizer)  # if every step so far overflowed, it has none
        dcp.save(training_state.boxes(self.pieces, self.optimizer) | self.small_state(), checkpoint_id=folder)
        if self._hook is not None and isinstance(self._hook[0], PowerSgd):
            self._hook[0].save(folder, ((piece.name, piece.weight) for piece in self.pieces))

    def load(self, folder: Path) -> None:
        fill(self.optimizer)
        state = training_state.boxes(self.pieces, self.optimizer) | self.small_state()
        dcp.load(state, checkpoint_id=folder)
        training_state.take_numbers(self.pieces, self.optimizer, state)
        training_state.copy_twins(self.pieces, self.optimizer)
        self.take_small_state(state)
        if self._hook is not None and isinstance(self._hook[0], PowerSgd):
            self._hook[0].load(folder, ((piece.name, piece.weight) for piece in self.pieces))

    def close(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
