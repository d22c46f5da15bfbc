"""The optimizer that a recipe names, over this rank's parts of the trainable parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from tasks.params import TrainParams
from tasks.trainer.pieces import local

BUCKET = 2**24  # numbers whose update stands beside them at once


def make_optimizer(
    train: TrainParams, trainable: list[torch.nn.Parameter], fused: bool
) -> torch.optim.Optimizer:
    """`fused`: AdamW in one kernel, where the device has it."""
    betas = (train.adam_beta1, train.adam_beta2)
    rate, decay = train.learning_rate, train.weight_decay
    if train.optim == "lion":
        return Lion(trainable, rate, betas, decay)
    if train.optim == "adafactor":
        return torch.optim.Adafactor(trainable, lr=rate, weight_decay=decay)
    if train.optim == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit

        small: torch.optim.Optimizer = AdamW8bit(
            trainable, lr=rate, betas=betas, eps=train.adam_epsilon, weight_decay=decay
        )
        return small
    return torch.optim.AdamW(
        trainable, lr=rate, betas=betas, eps=train.adam_epsilon, weight_decay=decay, fused=fused
    )


class Lion(torch.optim.Optimizer):
    """A step of `lr` by the sign of an average of gradients (arXiv:2302.06675, algorithm 2; decoupled weight decay)."""

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "the loop computes gradients itself"
        for group in self.param_groups:
            rate, (now, later) = group["lr"], group["betas"]
            for weights, gradients, averages in _buckets(self._parts(group["params"])):
                steps = torch._foreach_lerp(averages, gradients, 1 - now)
                torch._foreach_sign_(steps)
                if group["weight_decay"]:
                    torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
                torch._foreach_add_(weights, steps, alpha=-rate)
                torch._foreach_lerp_(averages, gradients, 1 - later)

    def _parts(self, weights: Iterable[torch.nn.Parameter]) -> Iterator[tuple[torch.Tensor, ...]]:
        """(weight, gradient, average) of this rank, in runs of at most a bucket."""
        for weight in weights:
            if weight.grad is None:
                continue
            state = self.state[weight]
            if not state:
                state["exp_avg"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
            whole = [local(each) for each in (weight, weight.grad, state["exp_avg"])]
            if all(each.is_contiguous() for each in whole):
                yield from zip(*(each.view(-1).split(BUCKET) for each in whole), strict=True)
            else:
                yield tuple(whole)


def _buckets(parts: Iterable[tuple[torch.Tensor, ...]]) -> Iterator[Iterator[list[torch.Tensor]]]:
    """Transposed lists of some `BUCKET` numbers each; numbers of one type in a list."""
    bucket: list[tuple[torch.Tensor, ...]] = []
    for part in parts:
        if not part[0].numel():
            continue
        held = sum(each[0].numel() for each in bucket)
        if bucket and (held + part[0].numel() > BUCKET or part[0].dtype != bucket[0][0].dtype):
            yield map(list, zip(*bucket, strict=True))
            bucket = []
        bucket.append(part)
    if bucket:
        yield map(list, zip(*bucket, strict=True))


def fill(optimizer: torch.optim.Optimizer) -> None:
    """Makes the state that an optimizer only makes at its first step, which is that of no step taken.

    It takes a step at rate zero, which moves nothing, unless it can be asked for its state. Gradients are dropped.
    """
    if optimizer.state:
        return
    if hasattr(optimizer, "init_state"):  # bitsandbytes
        for number, group in enumerate(optimizer.param_groups):
            for place, weight in enumerate(group["params"]):
                optimizer.init_state(group, weight, number, place)
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for weight in group["params"]:
            weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].zero_()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def fresh_state(optimizer: torch.optim.Optimizer, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """What an elementwise optimizer keeps of a flat buffer before its first step, which is zeros.

    It is asked by a step over one number, so that no gradient as large as the buffer is needed.
    """
    one = torch.nn.Parameter(torch.zeros_like(flat.detach()[:1]))
    one.grad = torch.zeros_like(one)
    groups = optimizer.param_groups
    optimizer.param_groups = [{**groups[0], "params": [one]}]
    optimizer.step()
    optimizer.param_groups = groups
    return {
        key: torch.zeros_like(flat.detach() if value.dim() else value)
        for key, value in optimizer.state.pop(one).items()
    }
