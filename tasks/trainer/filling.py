"""Gives a model on the meta device its numbers: this rank's boxes of every parameter, straight to where it trains.

Adapters, stages, NF4, cuts and shards were made without numbers. What is read now is what is kept, so no rank ever
holds a whole model, unless the plan gives it one. Only a matrix that becomes NF4 is read whole, quantised on the
device and cut, since its blocks and scales are those of the whole.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from tqdm import tqdm

from tasks.stage import lively
from tasks.trainer.pieces import Piece, pieces_of
from tasks.trainer.quantize import NF4Linear
from tasks.trainer.tensor_parallel import TensorParts
from tasks.trainer.weights import LoadedWeights, Weights

LARGE = 2**28  # bytes from which loading shows its progress
IN_PEFT = "base_model.model."  # before the base's names in a PEFT model


@dataclass(frozen=True)
class EmptyStage:
    """A pipeline stage (or all of a model) without numbers: `part` owns the names, `module` is what wraps it, FSDP2
    included.
    """

    module: nn.Module
    part: nn.Module
    parts: TensorParts | None


@dataclass(frozen=True)
class _Job:
    """One thing to read from `source`, by its name there; `size` in bytes."""

    source: Weights
    name: str
    size: int
    read: Callable[[], None]


def fill(
    stages: Sequence[EmptyStage], weights: Weights, adapters: LoadedWeights, device: torch.device
) -> None:
    """Room on `device` for every parameter of the stages, and its numbers; buffers go there, too.

    Parameters stay the objects they are, so what is tied, sharded or listed elsewhere remains so.

    Args:
        weights: of the base, by its names.
        adapters: by the names of the stages' parts.

    Raises:
        RuntimeError: something would be left without numbers.
    """
    for stage in stages:
        _check(stage, weights, adapters)
        _give_room(stage.module, device)
    jobs = [job for stage in stages for job in _jobs(stage, weights, adapters, device)]
    last = {job.name: number for number, job in enumerate(jobs)}
    bar = _bar(sum(job.size for job in jobs))
    with bar, lively(bar), torch.no_grad():
        for number, job in enumerate(jobs):
            job.read()
            if last[job.name] == number:
                job.source.forget(job.name)
            bar.update(job.size)


def _bar(size: int) -> tqdm:
    return tqdm(
        total=size,
        desc="loading weights",
        unit="B",
        unit_scale=True,
        disable=size < LARGE or os.environ.get("RANK", "0") != "0",
        file=sys.stderr,
        mininterval=0.5 if sys.stderr.isatty() else 2,
    )


def _check(stage: EmptyStage, weights: Weights, adapters: LoadedWeights) -> None:
    """There are numbers for everything that has none. To be asked before room is made, which is full of any."""
    packed = {id(buffer) for module in _packed_layers(stage.part) for buffer in module.buffers()}
    for name, tensor in (*stage.part.named_parameters(), *stage.part.named_buffers()):
        known = id(tensor) in packed or name in adapters or in_the_base(name) in weights
        if tensor.is_meta and not known:
            raise RuntimeError(f"{name} would be left without numbers")


def _give_room(module: nn.Module, device: torch.device) -> None:
    """As `module.to_empty(device)` for what has no numbers, and `module.to(device)` for the rest."""

    def room(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    # Without swapping, each name of a tied parameter would get a parameter of its own.
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module._apply(room)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _jobs(
    stage: EmptyStage, weights: Weights, adapters: LoadedWeights, device: torch.device
) -> Iterator[_Job]:
    packed = {id(module.weight): module for module in _packed_layers(stage.part)}
    for piece in pieces_of(stage.part, stage.parts, {}, first_stage=True, frozen=True):
        name = in_the_base(piece.name)
        if id(piece.weight) in packed:
            read = partial(_quantise, packed[id(piece.weight)], piece, name, weights, device)
            size = packed[id(piece.weight)].made_of.numel() * weights.kind(name).itemsize
            yield _Job(weights, name, size, read)
            continue
        source, key = (adapters, piece.name) if piece.name in adapters else (weights, name)
        for offsets, view in _views(piece):
            yield _Job(source, key, view.nbytes, partial(source.read, key, offsets, view))
    for own_name, buffer in stage.part.named_buffers():
        name = in_the_base(own_name)
        if name in weights:
            read = partial(weights.read, name, (0,) * buffer.dim(), buffer)
            yield _Job(weights, name, buffer.nbytes, read)


def _quantise(module: NF4Linear, piece: Piece, name: str, weights: Weights, device: torch.device) -> None:
    """Reads the matrix whole and keeps this rank's bytes of what it is in NF4."""
    matrix = torch.empty(module.made_of, dtype=weights.kind(name), device=device)
    weights.read(name, (0, 0), matrix)
    module.fill(matrix, [(offsets[0], view) for offsets, view in _views(piece)])


def _packed_layers(part: nn.Module) -> Iterator[NF4Linear]:
    return (module for module in part.modules() if isinstance(module, NF4Linear))


def _views(piece: Piece) -> Iterable[tuple[Sequence[int], torch.Tensor]]:
    """The boxes that this rank holds of a parameter, and where they begin in it."""
    return piece.box(piece.weight).inside.items()


def in_the_base(name: str) -> str:
    """A parameter's name before adapters were put around it."""
    return name.removeprefix(IN_PEFT).replace(".base_layer.", ".")
