"""Where the numbers of a model that has none yet come from: box by box, so that a rank asks for its own alone."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from transformers import PreTrainedModel


class Weights(Protocol):
    """The parameters (and stored buffers) of a whole model by the names of its `state_dict()`."""

    def __contains__(self, name: str) -> bool: ...

    def kind(self, name: str) -> torch.dtype:
        """What it is loaded as: its numbers are rounded to this first, whatever they become later."""
        ...

    def read(self, name: str, offsets: Sequence[int], into: torch.Tensor) -> None:
        """Copies the box of `into`'s shape that begins at `offsets` of the whole into `into`, on its device."""
        ...

    def forget(self, name: str) -> None:
        """It is not asked for again."""
        ...


@dataclass(frozen=True)
class MetaModel:
    """A model whose parameters have shapes and no numbers (device meta), and where these are. Its buffers are real."""

    model: PreTrainedModel
    weights: Weights


def put(part: torch.Tensor, kind: torch.dtype, into: torch.Tensor) -> None:
    """`into` becomes `part`, rounded to `kind` on the way. It travels as it is and is cast where it arrives."""
    part = part.to(into.device)
    into.copy_(part if kind in (part.dtype, into.dtype) else part.to(kind))


def box_of(whole: torch.Tensor, offsets: Sequence[int], sizes: torch.Size) -> torch.Tensor:
    """A view of the box."""
    return whole[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]


class LoadedWeights:
    """Tensors that are in memory already. They are given up one by one as they are forgotten."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def kind(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str, offsets: Sequence[int], into: torch.Tensor) -> None:
        whole = self._tensors[name]
        put(box_of(whole, offsets, into.shape), whole.dtype, into)

    def forget(self, name: str) -> None:
        self._tensors.pop(name, None)


class RandomWeights:
    """Random numbers for a trial, a function of seed and name, so that every rank of every plan has the same model.

    Matrices are normal, norms one, biases zero; all are numbers of bfloat16, so that precisions start alike.
    """

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        first: dict[int, str] = {}
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._one = {name: first.setdefault(id(weight), name) for name, weight in parameters.items()}
        self._shapes = {name: (weight.shape, weight.dtype) for name, weight in parameters.items()}
        self._spread = float(getattr(model.config, "initializer_range", 0.02))
        self._seed = seed

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def kind(self, name: str) -> torch.dtype:
        return self._shapes[name][1]

    def read(self, name: str, offsets: Sequence[int], into: torch.Tensor) -> None:
        shape, kind = self._shapes[name]
        put(box_of(self._whole(self._one[name], shape, into.device), offsets, into.shape), kind, into)

    def _whole(self, name: str, shape: torch.Size, device: torch.device) -> torch.Tensor:
        if len(shape) < 2:
            return torch.full(shape, float(name.endswith("weight")), dtype=torch.bfloat16, device=device)
        draw = torch.Generator(device).manual_seed(self._seed ^ zlib.crc32(name.encode()))
        whole = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return whole.normal_(0, self._spread, generator=draw)

    def forget(self, name: str) -> None:
        pass


def take_out(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters that have numbers, by every name they have; `module` keeps their shapes. What is tied stays so."""
    taken: dict[str, torch.Tensor] = {}
    empty: dict[nn.Parameter, nn.Parameter] = {}
    for path, owner in module.named_modules():
        for key, weight in owner._parameters.items():
            if weight is None or weight.is_meta:
                continue
            if weight not in empty:
                shape = torch.empty_like(weight, device="meta")
                empty[weight] = nn.Parameter(shape, requires_grad=weight.requires_grad)
            owner._parameters[key] = empty[weight]
            taken[f"{path}.{key}".lstrip(".")] = weight.detach()
    return taken


def meta_of(model: PreTrainedModel) -> MetaModel:
    """A loaded model, whose numbers are taken out of it."""
    return MetaModel(model, LoadedWeights(take_out(model)))


def same_parameters(model: nn.Module) -> list[list[str]]:
    """The names of each parameter and stored buffer: several where it is tied."""
    names: dict[int, list[str]] = {}
    state: Mapping[str, torch.Tensor] = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())
