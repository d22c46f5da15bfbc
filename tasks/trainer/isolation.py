"""Documents of one packed row, kept apart: positions restart at each, and none attends to another.

In one of three ways, by what model and device can do:
- varlen: flash attention over all tokens of a micro-batch that is told where documents begin. No mask is made and no
  score between two documents is computed. Half precision on GPUs.
- positions: transformers makes a block mask of positions that restart. Everywhere else.
- masks: as that, for families that are told no positions (ALiBi). A bias of distances does not change when a document
  begins later in a row. One of positions would lose digits there, and is that of positions in the document instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch._dynamo
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

VARLEN = "packed_varlen"  # as transformers is told of it; it makes no mask for a kind that it does not know
FLASH_CAPABILITY = (8, 0)
WIDEST_HEAD = 256
# A backward pass of wider heads needs the shared memory of an A100, a Hopper or a Blackwell for servers.
WIDEST_ON_SMALL_CHIPS = 192
LARGE_CHIPS = frozenset({(8, 0), (9, 0), (10, 0), (10, 3)})
# What a family may add to its scores, or in their place, and this attention does not.
ADDITIONS = ("attn_logit_softcapping", "attention_chunk_size", "kv_lora_rank")
# Families whose attention is told of its window. Others know it by their mask alone.
TOLD_OF_WINDOWS = frozenset({"mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma3_text"})
# torch 2.11 takes fewer heads of keys than of queries without being told.
GROUPED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)

Way = Literal["varlen", "positions", "masks"]
Change = Callable[[Any, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Documents:
    """Where the documents of a micro-batch lie, on its device; padding is a document of its own.

    `positions`: (rows, tokens), each token's in its document. `borders`: (documents + 1,) int32, where each begins
    among the tokens of all rows, and where the last ends. `longest`: a power of two that no document is longer than.
    """

    positions: torch.Tensor
    borders: torch.Tensor
    longest: int


def documents_of(positions: torch.Tensor, device: torch.device) -> Documents:
    """Reads positions, (rows, tokens) on the CPU, that restart at each document and each row."""
    starts = (positions.flatten() == 0).nonzero().squeeze(1)
    borders = torch.cat([starts, starts.new_tensor([positions.numel()])]).int().to(device, non_blocking=True)
    # Every micro-batch has another number of documents: no graph for the first alone.
    torch._dynamo.maybe_mark_dynamic(borders, 0)
    longest = 1 << int(positions.max()).bit_length()
    return Documents(positions.to(device, non_blocking=True), borders, longest)


def of_micro_batch(
    documents: Documents | tuple[Documents, ...] | None, number: torch.Tensor | None
) -> Documents | None:
    """Those of one micro-batch. A pipeline's schedule hands each stage the documents of all, and cuts `number`, which
    lies on the CPU, as it cuts its inputs.
    """
    if isinstance(documents, tuple):
        assert number is not None, "a pipeline says which micro-batch it is"
        return documents[int(number[0])]
    return documents


class Isolation:
    """Tells a model where documents lie, from the first packed micro-batch on.

    To be made before FSDP2, which renames the classes of layers.
    """

    def __init__(self, inner: PreTrainedModel, half: bool) -> None:
        self._inner, self._half = inner, half
        self._masked = [] if takes_positions(inner) else _layers(inner)
        self._way: Way | None = None
        self._positions: torch.Tensor | None = None
        self._known: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}

    def arguments(self, documents: Documents | None) -> dict[str, Any]:
        """What the model is called with besides its inputs: nothing where nothing is packed."""
        self._positions = None
        self._known.clear()
        if documents is None:
            return {}
        self.settle(documents.positions.device)
        if self._way == "masks":
            self._positions = documents.positions
            return {}
        if self._way == "positions":
            return {"position_ids": documents.positions}
        return {
            "position_ids": documents.positions,
            "cu_seq_lens_q": documents.borders,
            "cu_seq_lens_k": documents.borders,
            "max_length_q": documents.longest,
            "max_length_k": documents.longest,
        }

    def settle(self, device: torch.device) -> None:
        """Decides the way; the model is told of it once."""
        if self._way is None:
            self._way = self._choose(device)

    def of_copy(self, inner: PreTrainedModel) -> Isolation:
        """For a copy of the model, in the way that is settled."""
        other = Isolation(inner, self._half)
        other._way = self._way
        return other

    def _choose(self, device: torch.device) -> Way:
        if not takes_positions(self._inner):
            assert self._masked, "transformers names the layers of families that may be packed"
            for layer in self._masked:
                layer.register_forward_pre_hook(self._mask_layer, with_kwargs=True)
            return "masks"
        if self._half and why_not_varlen(self._inner, device) is None:
            AttentionInterface.register(VARLEN, varlen_attention)
            self._inner.set_attn_implementation(VARLEN)
            return "varlen"
        return "positions"

    def _mask_layer(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._positions is None:
            return None
        told = {"attention_mask": self._once(with_borders, kwargs.get("attention_mask"))}
        if "alibi" in kwargs:
            told["alibi"] = self._once(from_the_first, kwargs["alibi"])
        return args, kwargs | told

    def _once(self, change: Change, given: torch.Tensor | None) -> torch.Tensor:
        """All layers are given the same tensors, which are changed once a forward pass."""
        assert self._positions is not None
        if id(given) not in self._known:
            self._known[id(given)] = given, change(given, self._positions)
        return self._known[id(given)][1]


def with_borders(mask: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor:
    """A layer's mask, of what may be seen or of what is added to scores, that also ends at documents' borders."""
    apart = same_document(positions)
    if mask is None:
        return apart.tril()
    if mask.dtype == torch.bool:
        return mask & apart
    return mask.masked_fill(~apart, torch.finfo(mask.dtype).min)


def from_the_first(alibi: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """BLOOM's bias of positions in a row, (rows x heads, 1, tokens), as one of positions in a document."""
    by_row = alibi.unflatten(0, (len(positions), -1))
    return by_row.gather(-1, positions[:, None, None].expand_as(by_row)).flatten(0, 1)


def same_document(positions: torch.Tensor) -> torch.Tensor:
    """(rows, 1, tokens, tokens), true where two tokens of a row are of one document."""
    number = (positions == 0).cumsum(1)
    return (number[:, :, None] == number[:, None, :])[:, None]


def takes_positions(inner: PreTrainedModel) -> bool:
    """Whether the decoder's forward pass can be told positions."""
    decoder: nn.Module = inner.get_decoder()  # type: ignore[no-untyped-call]
    return "position_ids" in inspect.signature(type(decoder).forward).parameters


def _layers(inner: PreTrainedModel) -> list[nn.Module]:
    """Decoder layers that are here, as transformers names them."""
    whole = set(inner._no_split_modules or ())
    return [module for module in inner.modules() if type(module).__name__ in whole]


# --- flash attention over documents -------------------------------------------------------------


def why_not_varlen(inner: PreTrainedModel, device: torch.device) -> str | None:
    """What stands in the way of flash attention over documents, or None."""
    config = inner.config.get_text_config()
    if device.type != "cuda":
        return "it runs on CUDA GPUs alone"
    if not (inner._supports_flash_attn and inner._supports_attention_backend):
        return f"{type(inner).__name__} has an attention of its own"
    if getattr(config, "sliding_window", None) and config.model_type not in TOLD_OF_WINDOWS:
        return f"{type(inner).__name__} knows its window by a mask"
    added = next((name for name in ADDITIONS if getattr(config, name, None)), None)
    if added is not None:
        return f"{type(inner).__name__} has {added}"
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return _why_no_flash(device.index or 0, int(width))


@cache
def _why_no_flash(index: int, width: int) -> str | None:
    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch has no flash attention"
    capability = torch.cuda.get_device_capability(index)
    if capability < FLASH_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    if width % 8 or width > (WIDEST_HEAD if capability in LARGE_CHIPS else WIDEST_ON_SMALL_CHIPS):
        return f"heads of width {width}"
    return None


def varlen_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **told: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within documents, as transformers' layers call attention.

    Args:
        query: (rows, heads, tokens, width); key and value may have fewer heads.
        sliding_window: how many tokens a token sees, itself among them.
        told: `cu_seq_lens_q` and `max_length_q` of `Isolation.arguments`.

    Returns:
        (rows, tokens, heads, width), and no weights.
    """
    kind = query.device.type
    half = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
    rows, tokens = query.shape[0], query.shape[2]
    q, k, v = (states.transpose(1, 2).flatten(0, 1).to(half) for states in (query, key, value))
    borders, longest = told["cu_seq_lens_q"], told["max_length_q"]
    seen = (-1 if sliding_window is None else sliding_window - 1, 0)
    out = varlen_attn(q, k, v, borders, borders, longest, longest, scale=scaling, window_size=seen, **GROUPED)
    assert isinstance(out, torch.Tensor)
    return out.view(rows, tokens, *out.shape[1:]), None
