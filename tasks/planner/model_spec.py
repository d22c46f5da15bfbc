"""config.json -> ModelSpec: shapes and exact parameter counts, without loading or importing a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tasks.contracts import ModelSpec
from tasks.errors import UserError


@dataclass(frozen=True)
class Family:
    """What a model_type fixes: the values its config may leave out, and where biases and norms are.

    `head_dim` None means hidden_size / num_attention_heads; `kv_heads` None means as many as heads.
    `query_bias` None means the key `attention_bias` decides over q, k, v and o together; True means q, k
    and v always have one and o never; False means none ever.
    """

    hidden: int
    ffn: int
    heads: int
    kv_heads: int | None
    head_dim: int | None
    vocab: int
    max_positions: int
    query_bias: bool | None
    mlp_bias_key: bool
    query_key_norm: bool


# Left-out values are those of the transformers configuration classes (5.x); a test compares each with
# the real model. All of them have 32 layers, untied embeddings and a gated MLP by default.
FAMILIES: Mapping[str, Family] = {
    "llama": Family(4096, 11008, 32, None, None, 32000, 2048, None, True, False),
    "mistral": Family(4096, 14336, 32, 8, None, 32000, 131072, False, False, False),
    "qwen2": Family(4096, 22016, 32, 32, None, 151936, 32768, True, False, False),
    "qwen3": Family(4096, 22016, 32, 32, 128, 151936, 32768, None, False, True),
}
DEFAULT_LAYERS = 32


def model_spec(config: Mapping[str, object]) -> ModelSpec:
    """Reads the decoder's shapes from a Hugging Face config.

    Raises:
        UserError: an unsupported model_type, or a size that is no positive number.
    """
    family = _family(config)
    hidden = _size(config, "hidden_size", family.hidden)
    ffn = _size(config, "intermediate_size", family.ffn)
    layers = _size(config, "num_hidden_layers", DEFAULT_LAYERS)
    heads = _size(config, "num_attention_heads", family.heads)
    kv_heads = _size(config, "num_key_value_heads", family.kv_heads or heads, null=heads)
    head_dim = _size(config, "head_dim", family.head_dim or hidden // heads, null=hidden // heads)
    if heads % kv_heads:
        raise UserError(
            f"config.json: num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}, so heads "
            "cannot share keys; mend the config or use another model"
        )
    vocab = _size(config, "vocab_size", family.vocab)
    tied = config.get("tie_word_embeddings") is True
    linears = (
        ("q_proj", hidden, heads * head_dim),
        ("k_proj", hidden, kv_heads * head_dim),
        ("v_proj", hidden, kv_heads * head_dim),
        ("o_proj", heads * head_dim, hidden),
        ("gate_proj", hidden, ffn),
        ("up_proj", hidden, ffn),
        ("down_proj", ffn, hidden),
    )
    biased = _biased(config, family)
    layer = sum(d_in * d_out + (d_out if name in biased else 0) for name, d_in, d_out in linears)
    layer += 2 * hidden + (2 * head_dim if family.query_key_norm else 0)
    return ModelSpec(
        family=str(config["model_type"]),
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        max_positions=_size(config, "max_position_embeddings", family.max_positions),
        tied_embeddings=tied,
        gated_mlp=True,
        parameters=layers * layer + hidden + vocab * hidden * (1 if tied else 2),
        embedding_parameters=vocab * hidden,
        linear_shapes=linears,
    )


def matmul_parameters(spec: ModelSpec) -> int:
    """Parameters that every token is multiplied with: all but an input table that is no output head too."""
    return spec.parameters - (0 if spec.tied_embeddings else spec.embedding_parameters)


def lora_shapes(spec: ModelSpec, targets: str | Sequence[str]) -> tuple[tuple[str, int, int], ...]:
    """The linear modules of one layer that get an adapter.

    Raises:
        UserError: a target is no linear module of the decoder layer.
    """
    if isinstance(targets, str):  # "all-linear", the only word params.yaml allows
        return spec.linear_shapes
    names = [name for name, _, _ in spec.linear_shapes]
    wanted = {target.rsplit(".", 1)[-1]: target for target in targets}
    for name, target in wanted.items():
        if name not in names:
            raise UserError(
                f"train.lora.targets names {target!r}, which is no linear module of a {spec.family} layer; "
                f"use all-linear or some of {', '.join(names)}"
            )
    return tuple(shape for shape in spec.linear_shapes if shape[0] in wanted)


def lora_parameters(spec: ModelSpec, rank: int, targets: str | Sequence[str]) -> int:
    """Adapter parameters: r (d_in + d_out) for every target of every layer (LoRA, arXiv:2106.09685)."""
    return spec.layers * sum(rank * (d_in + d_out) for _, d_in, d_out in lora_shapes(spec, targets))


def _family(config: Mapping[str, object]) -> Family:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UserError(
            f"config.json: model_type={model_type!r} cannot be planned; supported are {', '.join(FAMILIES)}, "
            "so set model.name_or_path to a model of one of these"
        )
    return FAMILIES[model_type]


def _size(config: Mapping[str, object], key: str, default: int, null: int | None = None) -> int:
    """A positive size; left out it is `default`, said as null it is `null` (`default` if that is None)."""
    if key not in config:
        return default
    value = config[key]
    if value is None:
        return default if null is None else null
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(
            f"config.json: {key}={value!r} must be a whole number of at least 1; mend the model's config"
        )
    return value


def _biased(config: Mapping[str, object], family: Family) -> frozenset[str]:
    names: set[str] = set()
    if family.query_bias:
        names |= {"q_proj", "k_proj", "v_proj"}
    elif family.query_bias is None and config.get("attention_bias") is True:
        names |= {"q_proj", "k_proj", "v_proj", "o_proj"}
    if family.mlp_bias_key and config.get("mlp_bias") is True:
        names |= {"gate_proj", "up_proj", "down_proj"}
    return frozenset(names)
