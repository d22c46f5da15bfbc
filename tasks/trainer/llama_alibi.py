"""LLaMA with ALiBi in place of rotations, for Baichuan-13B: what transformers has no class for (docs/legacy.md).

Everything but positions and head is transformers' own LLaMA. Attention is told positions by its mask, which is made
once a forward pass: what is added to the scores of each head, and the least number where a token must not look. Such
a mask rules out flash attention. Importing this module makes the class known to AutoConfig and AutoModelForCausalLM.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaModel, LlamaPreTrainedModel

# Kernels that take a mask read it in pieces of as many numbers; other rows would be copied for every layer (torch's
# memory-efficient attention), and the copies kept for the backward pass.
ALIGNED = 16


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """One slope a head (arXiv:2108.12409, section 3, and the authors' code for other numbers than powers of two).

    For n heads 2^(-8/n), 2^(-16/n) and so on; further heads take every other slope of 2n heads.
    """
    power = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-8 * head / power) for head in range(1, power + 1)]
    rest = [2 ** (-4 * head / power) for head in range(1, 2 * (heads - power), 2)]
    return (*first, *rest)


class Alibi(nn.Module):
    """The mask that attention adds to its scores: -slope x distance where a token may look. It has no tensors."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.slopes = alibi_slopes(heads)

    def keep(self, rank: int, ranks: int) -> None:
        """Leaves the heads of one of `ranks` equal parts of attention."""
        here = len(self.slopes) // ranks
        self.slopes = self.slopes[here * rank : here * (rank + 1)]

    @torch.no_grad()
    def forward(
        self, mask: torch.Tensor | None, asked: torch.Tensor, keys: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """(rows, heads, queries, keys) in `dtype`; one row for all where there is no `mask`.

        Args:
            mask: (rows, keys so far), nonzero for a token and 0 for padding, which takes no position.
            asked: (queries,), the places of the queries among the keys.
            keys: how many there are, also those of a cache.
        """
        places = torch.arange(keys, device=asked.device)
        seen = (places <= asked[:, None])[None]
        positions = places[None]
        if mask is not None:
            there = functional.pad(mask.to(asked.device, torch.bool), (0, keys - mask.shape[1]))
            seen = seen & there[:, None]
            positions = there.cumsum(1)
        exact = torch.promote_types(dtype, torch.float32)
        distances = (positions[:, None] - positions.index_select(1, asked)[:, :, None]).to(exact)
        slopes = torch.tensor(self.slopes, dtype=exact).to(asked.device, non_blocking=True)
        shape = (len(seen), len(slopes), len(asked), keys + -keys % ALIGNED)
        added: torch.Tensor = torch.zeros(shape, dtype=dtype, device=asked.device)[..., :keys]
        torch.mul(slopes[:, None, None], distances[:, None], out=added)
        added.masked_fill_(~seen[:, None], torch.finfo(dtype).min)
        return added


class Unturned(nn.Module):
    """In the place of LLaMA's rotations: cosine 1 and sine 0 for every position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.new_ones(1, 1, self.width), x.new_zeros(1, 1, self.width)


class UnitRows(nn.Linear):
    """A head used with rows of length one, as Baichuan2's; the numbers it keeps are of any length.

    Products are divided by the lengths, so no second matrix is made. The lengths are those of what is multiplied:
    under autocast of its cast, as where sharded weights were cast before they were gathered.
    """

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weight, kind = self.weight, self.weight.device.type
        if torch.is_autocast_enabled(kind):
            weight = weight.to(torch.get_autocast_dtype(kind))
        exact = torch.promote_types(weight.dtype, torch.float32)
        lengths = torch.linalg.vector_norm(weight, dim=1, dtype=exact)
        # In place: products stay in their type, and no second ones are made where the head is frozen.
        return functional.linear(inputs, weight).div_(lengths.clamp(min=1e-12))


class LlamaAlibiConfig(LlamaConfig):
    """LLaMA's config; `unit_head` says that the head's rows are used with length one."""

    model_type = "llama_alibi"
    unit_head: bool = False


class LlamaAlibiModel(LlamaModel):
    config_class = LlamaAlibiConfig
    _supports_flash_attn = False
    _supports_flex_attn = False
    _can_compile_fullgraph = False

    def __init__(self, config: LlamaAlibiConfig) -> None:
        super().__init__(config)
        self.rotary_emb = Unturned(config.head_dim)
        self.alibi = Alibi(config.num_attention_heads)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As LlamaModel's. Positions are those of the mask: `position_ids` change nothing.

        Args:
            attention_mask: (rows, keys so far), 0 for padding; None where there is none.

        Raises:
            ValueError: a mask of another shape.
        """
        if attention_mask is not None and attention_mask.ndim != 2:
            raise ValueError(f"attention_mask must be (rows, tokens), and is {list(attention_mask.shape)}")
        states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        kind, queries = states.device.type, states.shape[1]
        cache = kwargs.get(
            "cache", kwargs.get("past_key_values")
        )  # what transformers 5.24 calls it, and 5.17
        before, keys = 0, queries
        if cache is not None:
            before, keys = cache.get_seq_length(), cache.get_mask_sizes(queries, 0)[0]
        asked = torch.arange(queries, device=states.device) + before
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype
        added = self.alibi(attention_mask, asked, keys, dtype)
        return super().forward(attention_mask=added, inputs_embeds=states, **kwargs)


class LlamaAlibiForCausalLM(LlamaForCausalLM):
    config_class = LlamaAlibiConfig
    _supports_flash_attn = False
    _supports_flex_attn = False
    _can_compile_fullgraph = False

    def __init__(self, config: LlamaAlibiConfig) -> None:
        LlamaPreTrainedModel.__init__(self, config)  # LlamaForCausalLM's own would make the rotating model
        self.model = LlamaAlibiModel(config)
        self.vocab_size = config.vocab_size
        head = UnitRows if config.unit_head else nn.Linear
        self.lm_head = head(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @staticmethod
    def create_masks_for_generate(
        attention_mask: torch.Tensor | None = None, **_: Any
    ) -> torch.Tensor | None:
        """Left as it is for a cache of fixed size too: the model makes its own of it."""
        return attention_mask


AutoConfig.register(LlamaAlibiConfig.model_type, LlamaAlibiConfig, exist_ok=True)
AutoModelForCausalLM.register(LlamaAlibiConfig, LlamaAlibiForCausalLM, exist_ok=True)
