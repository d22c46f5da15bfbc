"""Tensor parallelism: every layer's matrices cut over the ranks of a group, by the model's own plan.

transformers says for each linear layer of a family whether its output (colwise) or input (rowwise) features are cut.
Activations enter the module around them (attention, MLP) once and leave it by the sum of the rowwise products. What
an adapter adds is linear too: a colwise layer's lora_B and a rowwise layer's lora_A are cut like the base, and the
same sum completes both.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from peft.tuners.lora.layer import LoraLayer
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from tasks.trainer import collectives
from tasks.trainer.families import Family, family_of, layers_of
from tasks.trainer.quantize import NF4Linear

# transformers' words for what is cut. Whatever else its plans say is replicated.
CUT_DIM = {"colwise": 0, "rowwise": 1}


@dataclass(frozen=True)
class Cut:
    """What a rank holds of a parameter of shape `whole`: along `dim` these spans (start, size), one after another.

    There are several of a matrix that is several in one, and these are rows (dim 0).
    """

    dim: int
    spans: tuple[tuple[int, int], ...]
    whole: torch.Size


@dataclass
class TensorParts:
    """Of a model cut over `group`: each cut parameter by name, and whose gradients are terms of a sum over ranks.

    `first_logit` is the token of the head's first column here.
    """

    group: dist.ProcessGroup
    sequence: bool
    cuts: dict[str, Cut] = field(default_factory=dict)
    summed: set[str] = field(default_factory=set)
    first_logit: int = 0


class VocabularyEmbedding(nn.Module):
    """This rank's rows of an embedding table; a token of another rank's rows is zero here, and the sum is whole."""

    def __init__(self, table: nn.Embedding, start: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight = table.weight  # this rank's rows
        self._start, self._group = start, group
        padding = table.padding_idx
        here = padding is not None and start <= padding < start + self.weight.shape[0]
        self._padding = padding - start if padding is not None and here else None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        own = (ids >= self._start) & (ids < self._start + self.weight.shape[0])
        rows = functional.embedding(torch.where(own, ids - self._start, 0), self.weight, self._padding)
        return collectives.parts_to_whole(rows * own.unsqueeze(-1).to(rows.dtype), self._group)


def cut_over_ranks(
    model: nn.Module, base: PreTrainedModel, group: dist.ProcessGroup, sequence: bool
) -> TensorParts:
    """Cuts `base`, which `model` is or wraps with adapters, in place, to this rank's part.

    Args:
        sequence: between attention and MLP each rank holds a slice of the tokens, not all of them.
    """
    parts = TensorParts(group, sequence)
    names = {module: name for name, module in model.named_modules()}
    decoder, family = base.get_decoder(), family_of(base)
    plan = family.plan or base.config.base_model_tp_plan
    regions = []
    for path, module in decoder.named_modules():
        style = _style(plan, path)
        if style is None:
            continue
        _cut_linear(
            module, names[module], CUT_DIM[style], parts, family.fused.get(path.rpartition(".")[2], 1)
        )
        if style == "rowwise":
            region = decoder.get_submodule(path.rpartition(".")[0])
            regions.append(names[region])
            _cut_heads(region, base.config.num_attention_heads, family, parts)
            region.register_forward_pre_hook(_enter(parts), with_kwargs=True)
            module.register_forward_hook(_leave(parts))
    if family.alibi is not None:
        decoder.get_submodule(family.alibi).keep(group.rank(), group.size())
    head = base.get_output_embeddings()
    if isinstance(head, LoraLayer):
        regions.append(names[head])
    before = [getattr(decoder, name) for name in (family.table, *family.before)]
    outside = tuple(f"{names[module]}." for module in before if module in names)
    if sequence:
        _slice_tokens(base, parts)
    _cut_vocabulary(base, names, parts)
    for name, weight in model.named_parameters():
        replicated = weight.requires_grad and name not in parts.cuts
        inside = any(name.startswith(f"{region}.") for region in regions)
        if replicated and (inside or (sequence and not name.startswith(outside))):
            parts.summed.add(name)
    return parts


def _style(plan: Mapping[str, str], path: str) -> str | None:
    """colwise, rowwise, or None: the entry of the family's plan that a module of the decoder matches."""
    for pattern, style in plan.items():
        if style in CUT_DIM and fnmatch.fnmatchcase(path, pattern):
            return style
    return None


def _cut_linear(module: nn.Module, name: str, dim: int, parts: TensorParts, fused: int = 1) -> None:
    """A linear layer, or one with adapters around it; `fused` layers of one width in one."""
    if isinstance(module, LoraLayer):
        _cut_linear(module.get_base_layer(), f"{name}.base_layer", dim, parts, fused)
        which = "lora_B" if dim == 0 else "lora_A"
        for adapter, layer in getattr(module, which).items():
            _cut_parameter(layer, "weight", f"{name}.{which}.{adapter}.weight", dim, parts, fused)
        return
    if isinstance(module, NF4Linear):
        module.keep(dim, _spans((module.out_features, module.in_features)[dim], fused, parts))
    else:
        _cut_parameter(module, "weight", f"{name}.weight", dim, parts, fused)
    if module.bias is None:
        return
    if dim == 0:
        _cut_parameter(module, "bias", f"{name}.bias", 0, parts, fused)
    elif parts.group.rank() > 0 and isinstance(module, NF4Linear):  # added once to the sum
        module.bias = None
    elif parts.group.rank() > 0:
        module.forward = lambda inputs: functional.linear(inputs, module.weight)


def _spans(width: int, fused: int, parts: TensorParts) -> tuple[tuple[int, int], ...]:
    """This rank's part of each of `fused` sections of a width: (start, size)."""
    section = width // fused
    size = -(-section // parts.group.size())  # a vocabulary may leave the last rank fewer
    start = size * parts.group.rank()
    return tuple((before + start, min(size, section - start)) for before in range(0, width, section))


def _cut_parameter(
    module: nn.Module, attribute: str, name: str, dim: int, parts: TensorParts, fused: int = 1
) -> None:
    weight = getattr(module, attribute)
    cut = Cut(dim, _spans(weight.shape[dim], fused, parts), weight.shape)
    part = torch.cat([weight.detach().narrow(dim, *span) for span in cut.spans], dim)
    setattr(module, attribute, nn.Parameter(part, requires_grad=weight.requires_grad))
    parts.cuts[name] = cut


def _enter(parts: TensorParts) -> Callable[..., Any]:
    """Hidden states as they come into attention or MLP, its first argument or the one of that name."""
    enter = collectives.slice_to_parts if parts.sequence else collectives.whole_to_parts

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (enter(args[0], parts.group), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": enter(kwargs["hidden_states"], parts.group)}

    return hook


def _leave(parts: TensorParts) -> Callable[..., torch.Tensor]:
    leave = collectives.parts_to_slice if parts.sequence else collectives.parts_to_whole
    return lambda module, args, output: leave(output, parts.group)


def _cut_heads(region: nn.Module, heads: int, family: Family, parts: TensorParts) -> None:
    """Tells an attention module that counts its heads how many are here, and gives it what belongs to them."""
    if family.heads is None or not hasattr(region, family.heads):
        return
    here = heads // parts.group.size()
    setattr(region, family.heads, here)

    def own(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        for name in family.by_head:
            whole = kwargs[name].unflatten(0, (-1, heads))
            kwargs[name] = whole.narrow(1, here * parts.group.rank(), here).flatten(0, 1)
        return args, kwargs

    region.register_forward_pre_hook(own, with_kwargs=True)


def _slice_tokens(base: PreTrainedModel, parts: TensorParts) -> None:
    """All tokens go into the first of these layers and come out after the last (of a stage: its own)."""
    layers = [layer for layer in layers_of(base) if next(layer.parameters(), None) is not None]
    norm = getattr(base.get_decoder(), family_of(base).norm)

    def first(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (collectives.whole_to_slice(args[0], parts.group), *args[1:])

    layers[0].register_forward_pre_hook(first)
    # The last norm still works on slices. What follows, head or next stage, is given all tokens; the head's own
    # columns make partial gradients, which are summed here.
    normed = next(norm.parameters(), None) is not None
    back = collectives.slice_to_parts if normed else collectives.slice_to_whole
    norm.register_forward_hook(lambda module, args, output: back(output, parts.group))


def _cut_vocabulary(base: PreTrainedModel, names: dict[nn.Module, str], parts: TensorParts) -> None:
    """Embedding table by rows, head by columns of its output; a tied pair stays one parameter."""
    decoder, head, family = base.get_decoder(), base.get_output_embeddings(), family_of(base)
    table = getattr(decoder, family.table)
    tied = isinstance(table, nn.Embedding) and isinstance(head, nn.Linear) and table.weight is head.weight
    if isinstance(table, nn.Embedding):  # one with adapters stays whole on every rank
        name = f"{names[table]}.weight"
        _cut_parameter(table, "weight", name, 0, parts)
        setattr(decoder, family.table, VocabularyEmbedding(table, parts.cuts[name].spans[0][0], parts.group))
    if tied:
        head.weight = table.weight
        parts.cuts[f"{names[head]}.weight"] = parts.cuts[f"{names[table]}.weight"]
    elif head is not None and next(head.parameters(), None) is not None:
        _cut_linear(head, names[head], 0, parts)
    parts.first_logit = -(-base.config.vocab_size // parts.group.size()) * parts.group.rank()
