"""Families as one config makes them, where a row of the table alone cannot say it."""

from __future__ import annotations

from dataclasses import replace

from tasks.errors import UserError
from tasks.planner.config_values import ConfigValues
from tasks.planner.layout import Family, Linears, fused, gated, sizes


def qwen(family: Family, config: ConfigValues) -> Family:
    if config.flag("no_bias", True):
        return family
    return replace(
        family, attention=fused("c_attn", "c_proj", True, True), mlp=gated(True, ("w1", "w2", "c_proj"))
    )


def baichuan(family: Family, config: ConfigValues) -> Family:
    """The 13 B models use ALiBi, and their config class has no max_position_embeddings."""
    if "max_position_embeddings" in config or config.get("hidden_size") in (None, 4096):
        return family
    return replace(family, position="alibi", defaults=sizes(5120, 13696, 40, 40, 64000, 4096))


def chatglm(family: Family, config: ConfigValues) -> Family:
    if "inner_hidden_size" in config:
        raise UserError(
            "config.json: inner_hidden_size belongs to the first ChatGLM-6B, which cannot be planned; "
            "set model.name_or_path to ChatGLM2, ChatGLM3 or GLM-4"
        )
    family = replace(
        family,
        norm_bias=not config.flag("rmsnorm", True),
        outer_norms=1 if config.flag("post_layer_norm", True) else 0,
    )
    if not config.flag("multi_query_attention"):
        return family
    keys = {**family.keys, "num_key_value_heads": ("multi_query_group_num",)}
    return replace(family, keys=keys, defaults={**family.defaults, "num_key_value_heads": 1})


def falcon(family: Family, config: ConfigValues) -> Family:
    grouped = config.flag("new_decoder_architecture")
    norms = config.count("num_ln_in_parallel_attn", 2 if grouped else 1)
    family = replace(
        family,
        norms=2 if norms == 2 or not config.flag("parallel_attn", True) else 1,
        position="alibi" if config.flag("alibi") else "rope",
    )
    if grouped:
        return replace(family, keys={**family.keys, "num_key_value_heads": ("num_kv_heads",)})
    if config.flag("multi_query", True):
        return replace(family, defaults={**family.defaults, "num_key_value_heads": 1})
    return family


def opt(family: Family, config: ConfigValues) -> Family:
    width = config.size("word_embed_proj_dim", 0)
    if width not in (0, config.size("hidden_size", 768)):
        raise UserError(
            f"config.json: word_embed_proj_dim={width} differs from hidden_size, which cannot be planned; "
            "set model.name_or_path to an OPT model other than 350m"
        )
    last = config.flag("do_layer_norm_before", True) and not config.flag("_remove_final_layer_norm")
    weights = config.flag("layer_norm_elementwise_affine", True)
    return replace(family, outer_norms=1 if last else 0, norm_weights=weights)


def phi(family: Family, config: ConfigValues) -> Family:
    return replace(family, query_key_norm="shared with bias" if config.flag("qk_layernorm") else "")


def stablelm(family: Family, config: ConfigValues) -> Family:
    return replace(
        family,
        norms=1 if config.flag("use_parallel_residual") else 2,
        query_key_norm="every head" if config.flag("qk_layernorm") else "",
    )


def deepseek(family: Family, config: ConfigValues) -> Family:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): queries and keys through low ranks."""
    heads = config.size("num_attention_heads", 128)
    rope, nope = config.size("qk_rope_head_dim", 64), config.size("qk_nope_head_dim", 128)
    value, kv_rank = config.size("v_head_dim", 128), config.size("kv_lora_rank", 512)
    low = "q_lora_rank" not in config or config.get("q_lora_rank") is not None
    query_rank = config.size("q_lora_rank", 1536) if low else 0
    queries: Linears = (("q_proj", "hidden", "query", False),)
    if low:
        queries = (("q_a_proj", "hidden", "q_rank", "attention_bias"), ("q_b_proj", "q_rank", "query", False))
    attention: Linears = (
        *queries,
        ("kv_a_proj_with_mqa", "hidden", "kv_a", "attention_bias"),
        ("kv_b_proj", "kv_rank", "kv_b", False),
        ("o_proj", "value", "hidden", "attention_bias"),
    )
    widths = {
        "query": heads * (nope + rope),
        "q_rank": query_rank,
        "kv_rank": kv_rank,
        "kv_a": kv_rank + rope,
        "kv_b": heads * (nope + value),
        "value": heads * value,
    }
    return replace(
        family,
        attention=attention,
        widths=widths,
        extra_norm_width=query_rank + kv_rank,
        defaults={**family.defaults, "head_dim": nope + rope},
    )
