"""Pipeline parallelism: consecutive layers of the unmodified model on each rank, run by torch's schedules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from peft.tuners.lora.layer import LoraLayer
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from transformers import PreTrainedModel

from tasks.contracts import Plan
from tasks.planner.stages import layers_of_stages
from tasks.trainer.engine import Batch
from tasks.trainer.families import family_of, layers_of
from tasks.trainer.isolation import documents_of
from tasks.trainer.loss import TokenLossSum

ONE_CHUNK = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MANY_CHUNKS = {"interleaved1f1b": ScheduleInterleaved1F1B, "zerobubble": ScheduleZBVZeroBubble}


class Passed(nn.Module):
    """Stands where another stage's layer is, so that the layers here keep their numbers and names."""

    def __init__(self, bundled: bool) -> None:
        super().__init__()
        self._bundled = bundled  # such a layer returns a tuple

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (hidden_states,) if self._bundled else hidden_states


def stages_of(plan: Plan, rank: int) -> tuple[int, ...]:
    """Which of the pp x virtual_stages stages pipeline rank `rank` holds, ascending.

    Interleaved schedules deal them out in turn; zero-bubble's go forth and back, so that the first rank has the first
    and the last.
    """
    last = plan.pp * plan.virtual_stages - 1
    if plan.schedule == "zerobubble":
        return rank, last - rank
    return tuple(range(rank, last + 1, plan.pp))


def layer_range(layers: int, stage: int, stages: int) -> range:
    counts = layers_of_stages(layers, stages)
    start = sum(counts[:stage])
    return range(start, start + counts[stage])


def copies(model: nn.Module, base: nn.Module, count: int) -> list[tuple[nn.Module, nn.Module]]:
    """(model, base) and further ones made of the same parameters and buffers."""
    found = [(model, base)]
    for _ in range(count - 1):
        memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        other = copy.deepcopy(model, memo)
        found.append((other, memo[id(base)]))
    return found


def keep_stage(base: PreTrainedModel, stage: int, stages: int) -> None:
    """Leaves of `base`, in place, what stage number `stage` of `stages` computes."""
    decoder, family, layers = base.get_decoder(), family_of(base), layers_of(base)
    kept = layer_range(len(layers), stage, stages)
    for number in range(len(layers)):
        if number not in kept:
            layers[number] = Passed(family.bundled)
    head = base.get_output_embeddings()
    if stage < stages - 1:
        setattr(decoder, family.norm, nn.Identity())
        base.set_output_embeddings(nn.Identity())
    if stage > 0:
        tied = getattr(head, "weight", None) is getattr(decoder, family.table).weight
        if tied and stage == stages - 1:
            # The copy of a tied table. The engine keeps the two alike by summing their gradients.
            own = head.get_base_layer() if isinstance(head, LoraLayer) else head
            own.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
        for name in (family.table, *family.before):
            setattr(decoder, name, nn.Identity())


class Pipeline:
    """One step's micro-batches through this rank's stages, forward and backward."""

    def __init__(
        self,
        chunks: Sequence[TokenLossSum],
        plan: Plan,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.plan, self.group, self.device = plan, group, device
        self.stages = stages_of(plan, group.rank())
        self.chunks = chunks
        self.count = plan.pp * plan.virtual_stages
        self._schedule: Any = None
        self._length = 0
        self._factor = 1.0
        self.watch: Callable[[Sequence[PipelineStage]], None] | None = None  # told of stages that are built

    @property
    def is_last(self) -> bool:
        return self.count - 1 in self.stages

    def run(self, batches: Sequence[Batch], factor: float) -> torch.Tensor:
        """Forward and backward of all micro-batches; the gradients are those of the summed loss times `factor`.

        Args:
            batches: micro-batches of one shape.

        Returns:
            Sum of the token losses on the ranks of the last stage, zero on the others, in float64.
        """
        ids = torch.cat([batch.input_ids for batch in batches]).to(self.device, non_blocking=True)
        labels = torch.cat([batch.labels for batch in batches]).to(self.device, non_blocking=True)
        if ids.shape[1] != self._length:
            self._build(ids.shape[1])
        self._factor = factor
        losses: list[torch.Tensor] = []
        given = (ids,) if 0 in self.stages else ()
        told: dict[str, Any] = {"target": labels, "losses": losses} if self.is_last else {}
        told |= self._where_documents_lie(batches)
        self._schedule.step(*given, labels=labels, return_outputs=False, **told)
        if not losses:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return torch.stack([loss.detach().double() for loss in losses]).sum() / factor

    def _where_documents_lie(self, batches: Sequence[Batch]) -> dict[str, Any]:
        """What each stage needs beside its inputs where rows are packed: the schedule cuts tensors alone."""
        found = tuple(
            documents_of(batch.positions, self.device) for batch in batches if batch.positions is not None
        )
        if not found:
            return {}
        numbers = torch.arange(len(batches)).repeat_interleave(len(batches[0].input_ids))
        return {"documents": found, "number": numbers}

    def _build(self, length: int) -> None:
        """Stages for rows of `length` tokens: shapes are told, so that no pass is spent on finding them out."""
        made = []
        for number, chunk in zip(self.stages, self.chunks, strict=True):
            hidden = torch.empty(
                self.plan.micro_batch, length, chunk.width, dtype=chunk.dtype, device=self.device
            ).requires_grad_()
            ids = torch.zeros(self.plan.micro_batch, length, dtype=torch.int64, device=self.device)
            loss = torch.empty((), dtype=chunk.loss_dtype, device=self.device, requires_grad=True)
            made.append(
                PipelineStage(
                    chunk,
                    number,
                    self.count,
                    self.device,
                    input_args=ids if number == 0 else hidden,
                    output_args=loss if number == self.count - 1 else hidden,
                    group=self.group,
                )
            )
        if self.watch is not None:
            self.watch(made)
        self._schedule, self._length = self._schedule_of(made), length

    def _schedule_of(self, stages: list[PipelineStage]) -> Any:
        loss: Callable[..., torch.Tensor] = lambda output, target: output * self._factor  # noqa: E731
        options: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
        if self.plan.schedule in ONE_CHUNK:
            return ONE_CHUNK[self.plan.schedule](stages[0], self.plan.accumulation, **options)
        return MANY_CHUNKS[self.plan.schedule](stages, self.plan.accumulation, **options)
