"""The decoder of a config: its sizes, its linears and its exact number of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tasks.contracts import ModelSpec, MoeSpec
from tasks.errors import UserError
from tasks.planner.config_values import ConfigValues
from tasks.planner.families import FAMILIES
from tasks.planner.layout import Experts, Family, Linears
from tasks.planner.vision import VISION_FAMILIES

Shapes = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Sizes:
    """The sizes of one decoder; `widths` gives every name that a family's linears use."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    sliding_window: int | None
    widths: Mapping[str, int]


def decoder_spec(config: ConfigValues) -> ModelSpec:
    """The decoder alone.

    Raises:
        UserError: an unsupported model_type, a size that is no positive number, or sizes that do not go together.
    """
    family = _family(config)
    sizes = _sizes(config, family)
    moe = _moe(config, family.experts, sizes) if family.experts else None
    shared = family.experts.shared if family.experts and moe and moe.shared_ffn else ()
    rest = family.mlp if moe is None else shared
    widths = {**sizes.widths, "shared": moe.shared_ffn if moe else 0}
    layers = _layers(config, family, sizes, moe, _weights(config, family, rest, widths))
    tied = config.flag("tie_word_embeddings", family.tied)
    return ModelSpec(
        family=str(config.get("model_type")),
        layers=sizes.layers,
        hidden=sizes.hidden,
        ffn=sizes.ffn,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        vocab=sizes.vocab,
        max_positions=sizes.max_positions,
        tied_embeddings=tied,
        gated_mlp=len(family.mlp) == 3 or family.mlp[0][2] == "gate_up",
        fused_qkv=any(d_out == "qkv" for _, _, d_out, _ in family.attention),
        query_key_norm=bool(family.query_key_norm),
        position=family.position,
        sliding_window=sizes.sliding_window,
        parameters=layers + _outside(family, sizes) + sizes.vocab * sizes.hidden * (1 if tied else 2),
        layer_parameters=layers // sizes.layers,
        embedding_parameters=sizes.vocab * sizes.hidden,
        linear_shapes=shapes(family.attention + rest, widths),
        moe=moe,
        vision=None,
    )


def _family(config: ConfigValues) -> Family:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UserError(
            f"config.json: {config.name('model_type')}={model_type!r} cannot be planned; supported are "
            f"{', '.join([*FAMILIES, *VISION_FAMILIES])}, so set model.name_or_path to a model of one of these"
        )
    for key in ("vision_config", "visual"):
        if config.get(key):
            raise UserError(
                f"config.json: {config.name(key)} adds a vision tower to {model_type}, which cannot be planned; "
                f"set model.name_or_path to a model without one or to one of {', '.join(VISION_FAMILIES)}"
            )
    return FAMILIES[model_type].variant(FAMILIES[model_type], config)


def _sizes(config: ConfigValues, family: Family) -> Sizes:
    def size(key: str, default: int, null: int | None = None) -> int:
        return config.size(family.keys.get(key, (key,)), int(family.defaults.get(key) or default), null)

    hidden, heads = size("hidden_size", 0), size("num_attention_heads", 0)
    kv_heads = size("num_key_value_heads", heads, null=heads)
    head_dim = size("head_dim", hidden // heads, null=hidden // heads)
    ffn = size("intermediate_size", 4 * hidden) // (2 if family.halved_ffn else 1)
    if heads % kv_heads:
        raise UserError(
            f"config.json: num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}, so heads "
            "cannot share keys; mend the config or use another model"
        )
    said = family.defaults.get("head_dim") or any(
        config.get(key) for key in family.keys.get("head_dim", ("head_dim",))
    )
    if hidden % heads and not said:
        raise UserError(
            f"config.json: num_attention_heads={heads} does not divide hidden_size={hidden}, so heads have no width; "
            "mend the model's config"
        )
    query, key = heads * head_dim, kv_heads * head_dim
    return Sizes(
        hidden=hidden,
        ffn=ffn,
        layers=size("num_hidden_layers", 0),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=size("vocab_size", 0),
        max_positions=size("max_position_embeddings", 0),
        sliding_window=_sliding_window(config, family),
        widths={
            "one": 1,
            "hidden": hidden,
            "ffn": ffn,
            "gate_up": 2 * ffn,
            "query": query,
            "key": key,
            "qkv": query + 2 * key,
            **family.widths,
        },
    )


def _sliding_window(config: ConfigValues, family: Family) -> int | None:
    """The window that all layers have, or None."""
    key = "sliding_window"
    window = config.get(key) if key in config else family.defaults.get(key)
    if key not in family.defaults or window is None:
        return None
    return config.size(key, int(family.defaults[key] or 1))


def _layers(config: ConfigValues, family: Family, sizes: Sizes, moe: MoeSpec | None, rest: int) -> int:
    """Parameters of all layers; `rest` are those of the linears beside attention that every token passes."""
    every = _norms(family, sizes) + _weights(config, family, family.attention, sizes.widths)
    if moe is None:
        return sizes.layers * (every + rest)
    router = moe.experts * sizes.hidden
    dense = _weights(config, family, family.mlp, sizes.widths)
    sparse_layers = sizes.layers - moe.dense_layers
    return sizes.layers * every + moe.dense_layers * dense + sparse_layers * (router + rest) + moe.parameters


def _weights(config: ConfigValues, family: Family, linears: Linears, widths: Mapping[str, int]) -> int:
    """Weights and biases of one layer's linears."""
    total = 0
    for _, d_in, d_out, bias in linears:
        there = bias if isinstance(bias, bool) else config.flag(bias, family.defaults.get(bias) is True)
        total += widths[d_in] * widths[d_out] + (widths[d_out] if there else 0)
    return total


def _norms(family: Family, sizes: Sizes) -> int:
    """Norms of one layer."""
    query_key = {
        "": 0,
        "shared": 2 * sizes.head_dim,
        "shared with bias": 4 * sizes.head_dim,
        "every head": (sizes.heads + sizes.kv_heads) * sizes.head_dim,
    }[family.query_key_norm]
    return family.norms * _norm(family, sizes) + query_key + family.extra_norm_width


def _norm(family: Family, sizes: Sizes) -> int:
    if not family.norm_weights:
        return 0
    return sizes.hidden * (2 if family.norm_bias else 1)


def _outside(family: Family, sizes: Sizes) -> int:
    """What is neither in a layer nor in a vocabulary table."""
    positions = sizes.max_positions + family.position_offset if family.position == "learned" else 0
    head_bias = sizes.vocab if family.head_bias else 0
    return family.outer_norms * _norm(family, sizes) + positions * sizes.hidden + head_bias


def _moe(config: ConfigValues, experts: Experts, sizes: Sizes) -> MoeSpec | None:
    """The mixture of experts; None where every layer has an ordinary MLP after all."""
    count = config.size(experts.count_keys, experts.count)
    active = config.size("num_experts_per_tok", experts.active)
    if active > count:
        raise UserError(
            f"config.json: {config.name('num_experts_per_tok')}={active} is more than the {count} experts there are; "
            "mend the model's config"
        )
    ffn = config.size(experts.ffn, experts.ffn_default)
    shared = 0
    if experts.shared_ffn:
        shared = config.size(*experts.shared_ffn)
    elif experts.shared_count:
        shared = config.size(*experts.shared_count) * ffn
    dense = _dense_layers(config, experts, sizes.layers)
    if dense == sizes.layers:
        return None
    return MoeSpec(
        experts=count,
        active=active,
        ffn=ffn,
        shared_ffn=shared,
        dense_layers=dense,
        parameters=(sizes.layers - dense) * count * 3 * sizes.hidden * ffn,
    )


def _dense_layers(config: ConfigValues, experts: Experts, layers: int) -> int:
    if experts.first_dense:
        return min(config.count(*experts.first_dense), layers)
    step = config.size("decoder_sparse_step", 1)
    listed = config.get("mlp_only_layers") or []
    if not isinstance(listed, list):
        raise UserError(
            f"config.json: {config.name('mlp_only_layers')}={listed!r} must be a list of layer numbers; "
            "mend the model's config"
        )
    return sum(layer in listed or (layer + 1) % step != 0 for layer in range(layers))


def shapes(linears: Linears, widths: Mapping[str, int]) -> Shapes:
    return tuple((name, widths[d_in], widths[d_out]) for name, d_in, d_out, _ in linears)
