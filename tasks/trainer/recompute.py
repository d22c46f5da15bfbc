"""Activation checkpointing: what a decoder layer keeps for its backward pass, and what it computes again.

Works by replacing each layer's `forward`, not by wrapping the layer: parameter names stay, hooks on the layer itself
(FSDP2's) run once, and hooks inside it (tensor parallelism's) belong to what is computed again. transformers' own
switch is not used: version 5.17 checkpoints around such hooks and around a compiled forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel

from tasks.errors import UserError

Level = Literal["none", "selective", "full"]

# Operator -> position of its first factor. The second factor follows.
PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1}
ATTENTION = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "aten::_cudnn_attention_forward",
    "torch_attn::_varlen_attn",
)
# Only those that give a new tensor. One that works in place (torch.distributed.all_reduce) runs again, on every rank.
COLLECTIVES = (
    "_c10d_functional::all_reduce",
    "_c10d_functional::all_gather_into_tensor",
    "_c10d_functional::reduce_scatter_tensor",
    "_c10d_functional::all_to_all_single",
    "_c10d_functional::wait_tensor",
)
# A GPU does some 200 to 300 operations while it moves a byte (H200: 990 TFLOP/s over 4.8 TB/s). A product over fewer
# numbers costs no more than the elementwise work that is done again anyway, and its output is as large.
CHEAP_INNER = 256
OPTIONS = "recomputing"  # an attribute of a layer


def checkpoint_activations(base: PreTrainedModel, layers: Sequence[nn.Module], level: Level) -> None:
    """Makes each of `layers`, in place, keep less for its backward pass; gradients stay what they are.

    To be called after tensor parallelism and before `compile_layers` and FSDP2 or DDP.

    Args:
        level: "none" changes nothing. "full" keeps a layer's inputs alone. "selective" keeps besides what is dear to
            compute: outputs of matrix products, attention and collectives; norms, activation functions, rotations,
            casts, attention's scores and adapters' second products are computed again.

    Raises:
        UserError: the model's layers are not known.
    """
    if level == "none":
        return
    if not layers:
        raise UserError(
            f"activation_checkpointing={level} needs to know the layers of {type(base).__name__}, and transformers "
            "does not name them (_no_split_modules); use activation_checkpointing=none"
        )
    options: dict[str, Any] = {"context_fn": _keep_what_is_dear} if level == "selective" else {}
    for layer in layers:
        layer.forward = _recomputed(layer.forward, options)  # type: ignore[method-assign]
        setattr(layer, OPTIONS, options)


def _recomputed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """`forward` with what it computes dropped and computed again.

    Random states are neither kept nor restored, for nothing in a layer draws numbers: dropout is off in every model.
    """

    fixed = {"use_reentrant": False, "preserve_rng_state": False, **options}

    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # which has no such cache, and torch 2.11 cannot trace its switch
            return checkpoint(forward, *args, **fixed, **kwargs)
        with _casts_not_cached():
            return checkpoint(forward, *args, **fixed, **kwargs)

    return checkpointed


def follow_copy(layer: nn.Module) -> None:
    """A copy of a layer, with the layer's attributes, computes with its own weights again and not with the layer's."""
    options = layer.__dict__.get(OPTIONS)
    if options is not None:
        layer.forward = _recomputed(MethodType(type(layer).forward, layer), options)  # type: ignore[method-assign]


@contextmanager
def _casts_not_cached() -> Iterator[None]:
    """No cache of autocast's casts: a weight cast by an earlier micro-batch would be missing from what is computed
    again, operator by operator, and half-precision copies of all layers' weights would live until the loss.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _keep_what_is_dear() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    place = _products().get(operator)
    kept = operator in _others() if place is None else not _is_cheap(args[place], args[place + 1])
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _is_cheap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Few operations for much output: an adapter's B, or attention's scores where no kernel hides them."""
    inner, width = first.shape[-1], second.shape[-1]
    return bool(inner <= CHEAP_INNER and 4 * inner <= width)


@functools.cache
def _products() -> dict[Any, int]:
    return {getattr(torch.ops.aten, name).default: place for name, place in PRODUCTS.items()}


@functools.cache
def _others() -> frozenset[Any]:
    """Those of ATTENTION and COLLECTIVES that this version of torch has."""
    found = []
    for name in (*ATTENTION, *COLLECTIVES):
        space, operator = name.split("::")
        packet = getattr(getattr(torch.ops, space), operator, None)
        if packet is not None:
            found.append(packet.default)
    return frozenset(found)
