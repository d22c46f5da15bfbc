"""What a decoder family is made of, in the terms of which its parameters are counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tasks.planner.config_values import ConfigValues

# Module name, input width, output width, bias. Widths go by name (see `widths` in decoder.py); a bias is there,
# or not, or as the named key of the config says.
Linear = tuple[str, str, str, bool | str]
Linears = tuple[Linear, ...]

# Where the query-key norm has its weights: one head wide for all heads, the same with a bias, or one for every head.
QueryKeyNorm = Literal["", "shared", "shared with bias", "every head"]


@dataclass(frozen=True)
class Experts:
    """Where a mixture-of-experts config says its sizes, and what they are by default.

    `shared` are the linears that every token passes beside the routed experts: `shared_ffn` names their width, or
    `shared_count` how many experts wide they are. `first_dense` names the number of leading layers that have an
    ordinary MLP; without it decoder_sparse_step and mlp_only_layers say which layers have one.
    """

    count_keys: tuple[str, ...]
    count: int
    active: int
    ffn_default: int
    ffn: str = "moe_intermediate_size"
    shared: Linears = ()
    shared_ffn: tuple[str, int] | None = None
    shared_count: tuple[str, int] | None = None
    first_dense: tuple[str, int] | None = None


@dataclass(frozen=True)
class Family:
    """A model_type: its linears, norms and defaults.

    `keys` are the names under which a size is looked for, where they are not the usual one alone; none means that
    the config has no say. `defaults` stand for what a config leaves out; with none, num_key_value_heads is as many
    as heads, intermediate_size 4 x hidden, head_dim hidden / heads, and sliding_window is no key of this family
    (or not of all its layers). `norms` are those of a layer, `outer_norms` those outside of the layers. `widths`
    are added to those of decoder.py. `variant` makes the family what a config says, where a row alone cannot.
    """

    attention: Linears
    mlp: Linears
    defaults: Mapping[str, int | bool | None]
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    norms: int = 2
    outer_norms: int = 1
    norm_bias: bool = False
    norm_weights: bool = True
    query_key_norm: QueryKeyNorm = ""
    position: Literal["rope", "alibi", "learned"] = "rope"
    position_offset: int = 0  # rows of a learned table beyond the positions
    tied: bool = False
    head_bias: bool = False
    halved_ffn: bool = False  # the config counts gate and up together
    experts: Experts | None = None
    widths: Mapping[str, int] = field(default_factory=dict)
    extra_norm_width: int = 0  # norms inside a layer that are not hidden wide
    variant: Callable[[Family, ConfigValues], Family] = lambda family, _: family


def split(qkv: bool | str, out: bool | str, out_name: str = "o_proj") -> Linears:
    return (
        ("q_proj", "hidden", "query", qkv),
        ("k_proj", "hidden", "key", qkv),
        ("v_proj", "hidden", "key", qkv),
        (out_name, "query", "hidden", out),
    )


def fused(name: str, out_name: str, qkv: bool | str, out: bool | str) -> Linears:
    return ((name, "hidden", "qkv", qkv), (out_name, "query", "hidden", out))


def gated(
    bias: bool | str = False,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    width: str = "ffn",
) -> Linears:
    gate, up, down = names
    return ((gate, "hidden", width, bias), (up, "hidden", width, bias), (down, width, "hidden", bias))


def fused_gated(up: str, down: str, bias: bool | str = False) -> Linears:
    return ((up, "hidden", "gate_up", bias), (down, "ffn", "hidden", bias))


def plain(up: str, down: str, bias: bool | str = True) -> Linears:
    return ((up, "hidden", "ffn", bias), (down, "ffn", "hidden", bias))


def sizes(
    hidden: int,
    ffn: int | None,
    layers: int,
    heads: int,
    vocab: int,
    positions: int,
    **more: int | bool | None,
) -> dict[str, int | bool | None]:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        **more,
    }
