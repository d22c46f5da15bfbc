"""The collectives of tensor parallelism, each with the one that its backward pass needs.

Names say what happens to an activation of shape (rows, tokens, width) whose group is the tensor-parallel ranks. A
"whole" tensor is equal on all ranks, a "partial" one is a term of their sum, a "slice" has 1/tp of the tokens.
See Megatron (arXiv:1909.08053, section 3; sequence parallelism: arXiv:2205.05198, section 4.2).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function

from tasks.trainer.clock import exchanging

TOKENS = 1  # the dim that sequence parallelism slices


# Of torch's two kinds of collectives these give a new tensor. What an autograd function changed in place and returns
# loses its gradient when torch 2.11 compiles it (pytorch issue 180642).
_FUNCTIONAL = torch.ops._c10d_functional


def _sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    with exchanging():
        sent = _FUNCTIONAL.all_reduce(tensor.contiguous(), "sum", group.group_name)
        total = _FUNCTIONAL.wait_tensor(sent)
    return total.view_as(total)


def _join(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Slices put together along the tokens."""
    rows = tensor.transpose(0, TOKENS).contiguous()
    with exchanging():
        sent = _FUNCTIONAL.all_gather_into_tensor(rows, group.size(), group.group_name)
        whole = _FUNCTIONAL.wait_tensor(sent)
    return whole.transpose(0, TOKENS).contiguous()


def _own_slice(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return tensor.chunk(group.size(), dim=TOKENS)[group.rank()].contiguous()


def _sum_to_slice(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The rank's slice of the sum of partial tensors."""
    rows = tensor.transpose(0, TOKENS).contiguous()
    with exchanging():
        sent = _FUNCTIONAL.reduce_scatter_tensor(rows, "sum", group.size(), group.group_name)
        mine = _FUNCTIONAL.wait_tensor(sent)
    return mine.transpose(0, TOKENS).contiguous()


class _WholeToParts(Function):
    """Whole -> the same, used by each rank for its own columns; its gradients are partial and summed."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(gradient, ctx.group), None


class _PartsToWhole(Function):
    """Partial -> whole; the gradient of the whole is that of each part."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _sum(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _SliceToParts(Function):
    """Slice -> whole for each rank's own columns; partial gradients are summed to slices."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _join(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum_to_slice(gradient, ctx.group), None


class _PartsToSlice(Function):
    """Partial -> the rank's slice of the sum; gradients of slices are joined."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _sum_to_slice(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _join(gradient, ctx.group), None


class _WholeToSlice(Function):
    """Whole -> the rank's slice; gradients of slices are joined."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _own_slice(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _join(gradient, ctx.group), None


class _SliceToWhole(Function):
    """Slice -> whole, used alike by all ranks; each takes its slice of the (equal) gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _join(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _own_slice(gradient, ctx.group), None


def whole_to_parts(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return _WholeToParts.apply(tensor, group)


def parts_to_whole(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return _PartsToWhole.apply(tensor, group)


def slice_to_parts(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return _SliceToParts.apply(tensor, group)


def parts_to_slice(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return _PartsToSlice.apply(tensor, group)


def whole_to_slice(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return _WholeToSlice.apply(tensor, group)


def slice_to_whole(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return _SliceToWhole.apply(tensor, group)


class _VocabularyLoss(Function):
    """Summed cross-entropy over logits whose vocabulary is shared out over ranks."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, start: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        largest = logits.amax(dim=-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shares = (logits - largest.unsqueeze(-1)).exp_()
        total = shares.sum(dim=-1)
        mine = (targets >= start) & (targets < start + logits.shape[-1])
        column = torch.where(mine, targets - start, 0)
        reached = logits.gather(1, column.unsqueeze(1)).squeeze(1) - largest
        told = torch.stack([total, torch.where(mine, reached, 0.0)])
        dist.all_reduce(told, group=group)
        total, reached = told
        ctx.save_for_backward(shares.div_(total.unsqueeze(-1)), column, mine)
        return (total.log() - reached).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        shares, column, mine = ctx.saved_tensors
        result = shares.clone()
        result[torch.arange(len(column), device=column.device), column] -= mine.to(shares.dtype)
        return result.mul_(gradient), None, None, None


def vocabulary_loss(
    logits: torch.Tensor, targets: torch.Tensor, start: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Sum over tokens of -log softmax(all logits)[target], equal on all ranks.

    Args:
        logits: (tokens, vocabulary / tp), this rank's columns from `start` on, in float32 or float64.
        targets: (tokens,), numbers in the whole vocabulary.
    """
    return _VocabularyLoss.apply(logits, targets, start, group)
