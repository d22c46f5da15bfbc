"""The engine deepspeed: ZeRO 0 to 3 and offload by DeepSpeed, under our own loop, sample order, loss and schedule."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from tasks.contracts import Plan, Precision
from tasks.errors import UserError
from tasks.params import TrainParams
from tasks.stage import heartbeat
from tasks.trainer.adapters import attach_adapters, stay_in_half
from tasks.trainer.clock import StepClock
from tasks.trainer.engine import Batch, StepResult
from tasks.trainer.engine_base import EngineBase
from tasks.trainer.filling import EmptyStage, fill
from tasks.trainer.loss_scale import LossScale
from tasks.trainer.optimizers import make_optimizer
from tasks.trainer.parallelize import count_parameters, local_device, prepared
from tasks.trainer.step_parts import schedule_of, sent_to, tell
from tasks.trainer.weights import LoadedWeights, MetaModel, take_out
from tasks.trainer.zero_config import zero_config
from tasks.trainer.zero_loading import fill_partitioned
from tasks.trainer.zero_state import ZeroState


class DeepSpeedEngine(EngineBase):
    """Implements `Engine` for every plan of the engine deepspeed.

    Parameters are in float32 under autocast, and gradients are reduced in float32, as under the native engine: so
    DeepSpeed's own modes for half precision, which round differently, are not used.
    """

    def __init__(
        self,
        base: MetaModel,
        train: TrainParams,
        plan: Plan,
        precision: Precision,
        total_steps: int,
        seed: int,
        swap: Path | None = None,
    ) -> None:
        """
        Args:
            swap: folder for what the plan keeps on NVMe.
        """
        deepspeed = import_deepspeed(plan)
        self.train, self.plan, self.precision = train, plan, precision
        self.device = local_device(plan)
        self._config = zero_config(plan, train, swap)
        self.model = attach_adapters(base.model, train, seed).train()
        stay_in_half(self.model, precision)
        adapters = LoadedWeights(take_out(self.model))
        self.parameters, self.outline = count_parameters(self.model), copy.deepcopy(self.model)
        module = prepared(self.model, base.model, plan, precision, None, 0)
        deepspeed.init_distributed(dist_backend="nccl" if plan.device == "cuda" else "gloo")
        if plan.on_disk:
            _compile_async_io()
        if plan.sharding == "zero3":
            fill_partitioned(module, self.model, base.weights, adapters, self.device, self._config)
        else:
            fill([EmptyStage(module, self.model, None)], base.weights, adapters, self.device)
        trainable = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        # Fused on a CPU, too: what is offloaded is stepped by all cores in one pass.
        fused = plan.device == "cuda" or plan.offload != "none"
        self.optimizer = make_optimizer(train, list(trainable.values()), fused)
        self.schedule = schedule_of(self.optimizer, train, total_steps)
        self.engine, wrapped, _, _ = deepspeed.initialize(
            model=module, optimizer=self.optimizer, config=self._config, dist_init_required=False
        )
        self.state = ZeroState(wrapped, self.optimizer, trainable)
        self._zero = wrapped if self.state.stage else None
        self._trainable = list(trainable.values())
        self.loss_scale = LossScale(enabled=precision == "float16")
        self.step_clock = StepClock(module, plan.device == "cuda")

    # --- a step ---------------------------------------------------------------------------------

    def train_step(self, batches: Sequence[Batch], target_tokens: int, flags: Sequence[bool]) -> StepResult:
        """See `Engine.train_step`."""
        self.step_clock.start()
        summed = torch.zeros((), dtype=torch.float64, device=self.device)
        # DeepSpeed takes means over ranks.
        factor = self.plan.data_parallel / target_tokens
        if self._zero is not None and self.loss_scale.enabled:
            self._zero.override_loss_scale(self.loss_scale.value)
        elif self.loss_scale.enabled:
            factor *= self.loss_scale.value
        for index, batch in enumerate(batches):
            self.engine.set_gradient_accumulation_boundary(index == len(batches) - 1)
            loss = self._loss_sum(batch)
            summed += loss.detach().double()
            self.engine.backward(loss * factor, scale_wrt_gas=False)
        self.step_clock.reduced()
        norm, taken = self._step_alone() if self._zero is None else self._step_of_zero()
        self.loss_scale.update(taken)
        rate = float(self.schedule.get_last_lr()[0])
        self.schedule.step()
        told, others = tell(summed / target_tokens, flags, self.plan)
        result = StepResult(loss=told, grad_norm=norm, learning_rate=rate, skipped=not taken, flags=others)
        self.step_clock.stop()
        return result

    def _loss_sum(self, batch: Batch) -> torch.Tensor:
        tensors, told = sent_to(batch, self.device)
        loss: torch.Tensor = self.engine(*tensors, **told)
        return loss

    def _step_of_zero(self) -> tuple[float, bool]:
        """(gradient norm, whether the step was taken): DeepSpeed unscales, takes the norm, clips and steps."""
        self.engine.step()
        return float(self.engine.get_global_grad_norm()), bool(self.engine.was_step_applied())

    def _step_alone(self) -> tuple[float, bool]:
        """The same without ZeRO, where every rank has every gradient."""
        gradients = [weight.grad for weight in self._trainable if weight.grad is not None]
        norm = self.clipped(gradients, torch.stack(torch._foreach_norm(gradients)).double().square().sum())
        finite = not self.loss_scale.enabled or bool(norm.isfinite())
        if finite:
            self.engine.step()
        else:
            self.engine.zero_grad()
        return float(norm), finite

    # --- state ----------------------------------------------------------------------------------

    def _all_state(self) -> dict[str, Any]:
        self.state.fill()
        return self.state.boxes() | self.small_state()

    def save(self, folder: Path) -> None:
        """Trainable weights and optimizer state by parameter name, as every engine writes them."""
        dcp.save(self._all_state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        state = self._all_state()
        dcp.load(state, checkpoint_id=folder)
        self.state.take()
        self.take_small_state(state)

    def close(self) -> None:
        self.engine.destroy()


def _compile_async_io() -> None:
    """The op that moves states to NVMe and back: compiled once a machine and kept in torch's cache. Ranks wait for the
    one that compiles by a file, so that no collective runs out of time.

    Raises:
        UserError: it cannot be compiled here.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder

    said = "loading DeepSpeed's op for NVMe, which is compiled the first time"
    with heartbeat(said) if os.environ.get("RANK", "0") == "0" else nullcontext():
        try:
            AsyncIOBuilder().load(verbose=False)
        except (RuntimeError, OSError, ImportError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"the plan keeps states on NVMe, and DeepSpeed's op for that could not be compiled ({reason}); "
                "install libaio-dev and a C++ compiler, or use select_strategy.offload=cpu"
            ) from error


def import_deepspeed(plan: Plan) -> Any:
    """The library, told which device it is for and to keep quiet: it looks at the environment as it is imported."""
    os.environ["DS_ACCELERATOR"] = plan.device
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    # It calls torch's collectives by their older names.
    warnings.filterwarnings(
        "ignore", message=".*(reduce_scatter_tensor|all_gather_into_tensor)", category=FutureWarning
    )
    if plan.device == "cpu":
        # A sum over processes by shared memory, for inference; it would be compiled for minutes.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
