"""The families whose layers can be cut over ranks and stages: what their modules are called and how they are cut.

A family needs one entry: where its decoder keeps layers, embedding table and last norm, and which linear layers are
cut by their outputs (colwise) or inputs (rowwise). transformers has that plan for most; where it has none, it is here.
Rows of one head stay together on a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Family:
    """Names in the decoder, and what differs from LLaMA.

    `plan`: pattern of a linear layer's path -> colwise or rowwise; None takes transformers' own. `fused`: names of
    colwise layers whose outputs are those of several layers of one width, one after another, and of how many.
    `before`: modules between embedding and layers. `heads`: the attribute of an attention module that counts its
    heads, if its forward pass reads one. `by_head`: keyword arguments of attention with rows x heads entries in their
    first dim. `alibi`: the decoder's module that makes the mask of every head and can `keep` a rank's. `bundled`: a
    layer returns a tuple. `rounds`: attention takes its softmax in float32 in every precision.
    """

    layers: str = "layers"
    table: str = "embed_tokens"
    norm: str = "norm"
    before: tuple[str, ...] = ()
    plan: Mapping[str, str] | None = None
    fused: Mapping[str, int] = field(default_factory=dict)
    heads: str | None = None
    by_head: tuple[str, ...] = ()
    alibi: str | None = None
    bundled: bool = False
    rounds: bool = False


LLAMA = Family()
# ALiBi instead of rotations; query, key and value of a head lie together in one matrix (arXiv:2211.05100).
BLOOM = Family(
    layers="h",
    table="word_embeddings",
    norm="ln_f",
    before=("word_embeddings_layernorm",),
    plan={
        "h.*.self_attention.query_key_value": "colwise",
        "h.*.self_attention.dense": "rowwise",
        "h.*.mlp.dense_h_to_4h": "colwise",
        "h.*.mlp.dense_4h_to_h": "rowwise",
    },
    heads="num_heads",
    by_head=("alibi",),
    bundled=True,
    rounds=True,
)
# Gate and up are one matrix, which transformers' own plan leaves whole; a rank has its rows of both.
GLM = Family(
    plan={
        "layers.*.self_attn.[qkv]_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    },
    fused={"gate_up_proj": 2},
)
FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), LLAMA),
    **dict.fromkeys(("glm", "glm4"), GLM),
    "bloom": BLOOM,
    "llama_alibi": Family(alibi="alibi"),  # Baichuan-13B; its linear layers and their plan are LLaMA's
}


def family_of(base: PreTrainedModel) -> Family:
    """LLAMA's names stand in for those of a family that is not cut."""
    return FAMILIES.get(base.config.model_type, LLAMA)


def layers_of(base: PreTrainedModel) -> nn.ModuleList:
    layers: nn.ModuleList = getattr(base.get_decoder(), family_of(base).layers)
    return layers
