"""Gives a model for DeepSpeed its numbers: whole on every rank up to ZeRO-2, and for ZeRO-3 a module at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tasks.trainer.filling import in_the_base
from tasks.trainer.weights import LoadedWeights, Weights


def fill_partitioned(
    module: nn.Module,
    part: nn.Module,
    weights: Weights,
    adapters: LoadedWeights,
    device: torch.device,
    config: dict[str, Any],
) -> None:
    """Each parameter is read whole by rank 0, sent to the others and cut, so that a rank has whole what one module owns
    directly and else its shares. Collective.

    Args:
        module: what DeepSpeed will train; its parameters are on the meta device.
        part: inside of it, the model that owns the names of `adapters`.
        config: DeepSpeed's, which says where the shares are kept.

    Raises:
        RuntimeError: something would be left without numbers.
    """
    from deepspeed import zero

    names = {id(weight): name for name, weight in part.named_parameters()}
    for owner in _owners(module):
        for weight in owner.parameters(recurse=False):
            if not weight.is_meta:
                continue
            name = names[id(weight)]
            source, key = (adapters, name) if name in adapters else (weights, in_the_base(name))
            if key not in source:
                raise RuntimeError(f"{name} would be left without numbers")
            whole = torch.empty(weight.shape, dtype=weight.dtype, device=device)
            if dist.get_rank() == 0:
                source.read(key, (0,) * whole.dim(), whole)
            source.forget(key)
            # The parameter stays the object it is, so what is tied or listed elsewhere remains so.
            torch.utils.swap_tensors(weight, nn.Parameter(whole, requires_grad=weight.requires_grad))
        zero.Init(module=_Alone(owner), config_dict_or_path=config)
    _buffers(module, part, weights, device)


class _Alone(nn.Module):
    """A module's own parameters without its children's."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        for key, weight in owner.named_parameters(recurse=False):
            self.register_parameter(key, weight)


def _owners(module: nn.Module) -> Iterator[nn.Module]:
    return (each for each in module.modules() if next(each.parameters(recurse=False), None) is not None)


def _buffers(module: nn.Module, part: nn.Module, weights: Weights, device: torch.device) -> None:
    for owner in module.modules():
        for key, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[key] = buffer.to(device)
    for name, buffer in part.named_buffers():
        key = in_the_base(name)
        if key in weights:
            weights.read(key, (0,) * buffer.dim(), buffer)
