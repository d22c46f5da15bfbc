"""The decoder families the planner knows: one row each.

Left-out values are those of the transformers configuration classes (5.x), or of the family's own code where
transformers has no class (qwen, baichuan, chatglm). Tests compare every row with the real model.
"""

from __future__ import annotations

from collections.abc import Mapping

from tasks.planner import variants
from tasks.planner.layout import Experts, Family, fused, fused_gated, gated, plain, sizes, split

_GPT_NAMES = {
    "hidden_size": ("n_embd", "hidden_size"),
    "intermediate_size": ("n_inner",),
    "num_hidden_layers": ("n_layer", "num_hidden_layers"),
    "num_attention_heads": ("n_head", "num_attention_heads"),
    "num_key_value_heads": (),
    "max_position_embeddings": ("n_positions", "max_position_embeddings"),
}
_BLOOM_NAMES = {
    **_GPT_NAMES,
    "hidden_size": ("n_embed", "hidden_size"),
    "intermediate_size": (),
    "max_position_embeddings": ("seq_length",),
}
_MPT_NAMES = {
    "hidden_size": ("d_model", "hidden_size"),
    "intermediate_size": (),  # transformers' class reads no expansion_ratio
    "num_hidden_layers": ("n_layers", "num_hidden_layers"),
    "num_attention_heads": ("n_heads", "num_attention_heads"),
    "num_key_value_heads": (),
    "max_position_embeddings": ("max_seq_len",),
}
_CHATGLM_NAMES = {
    "intermediate_size": ("ffn_hidden_size",),
    "num_hidden_layers": ("num_layers",),
    "num_key_value_heads": (),
    "head_dim": ("kv_channels",),
    "vocab_size": ("padded_vocab_size",),
    "max_position_embeddings": ("seq_length",),
}

_QWEN3_ATTENTION = split("attention_bias", "attention_bias")
_SHARED = gated(width="shared")

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        split("attention_bias", "attention_bias"), gated("mlp_bias"), sizes(4096, 11008, 32, 32, 32000, 2048)
    ),
    "mistral": Family(
        split(False, False),
        gated(),
        sizes(4096, 14336, 32, 32, 32000, 131072, num_key_value_heads=8, sliding_window=4096),
    ),
    "qwen2": Family(
        split(True, False), gated(), sizes(4096, 22016, 32, 32, 151936, 32768, num_key_value_heads=32)
    ),
    "qwen3": Family(
        _QWEN3_ATTENTION,
        gated(),
        sizes(4096, 22016, 32, 32, 151936, 32768, num_key_value_heads=32, head_dim=128),
        query_key_norm="shared",
    ),
    "mixtral": Family(
        split(False, False),
        gated(),
        sizes(4096, 14336, 32, 32, 32000, 131072, num_key_value_heads=8, sliding_window=None),
        experts=Experts(
            ("num_local_experts", "num_experts"), 8, active=2, ffn="intermediate_size", ffn_default=14336
        ),
    ),
    "qwen2_moe": Family(
        split("qkv_bias", False),
        gated(),
        sizes(2048, 5632, 24, 16, 151936, 32768, num_key_value_heads=16, qkv_bias=True),
        experts=Experts(
            ("num_experts", "num_local_experts"),
            60,
            active=4,
            ffn_default=1408,
            shared=(*_SHARED, ("shared_expert_gate", "hidden", "one", False)),
            shared_ffn=("shared_expert_intermediate_size", 5632),
        ),
    ),
    "qwen3_moe": Family(
        _QWEN3_ATTENTION,
        gated(),
        sizes(2048, 6144, 24, 32, 151936, 32768, num_key_value_heads=4),
        query_key_norm="shared",
        experts=Experts(("num_experts", "num_local_experts"), 128, active=8, ffn_default=768),
    ),
    "deepseek_v3": Family(
        (),
        gated(),
        sizes(7168, 18432, 61, 128, 129280, 4096),
        keys={"head_dim": (), "num_key_value_heads": ()},
        experts=Experts(
            ("n_routed_experts", "num_local_experts"),
            256,
            active=8,
            ffn_default=2048,
            shared=_SHARED,
            shared_count=("n_shared_experts", 1),
            first_dense=("first_k_dense_replace", 3),
        ),
        variant=variants.deepseek,
    ),
    "gemma": Family(
        split("attention_bias", "attention_bias"),
        gated(),
        sizes(3072, 24576, 28, 16, 256000, 8192, num_key_value_heads=16, head_dim=256),
        tied=True,
    ),
    "gemma2": Family(
        split("attention_bias", "attention_bias"),
        gated(),
        sizes(2304, 9216, 26, 8, 256000, 8192, num_key_value_heads=4, head_dim=256),
        norms=4,
        tied=True,
    ),
    "gemma3_text": Family(
        split("attention_bias", "attention_bias"),
        gated(),
        sizes(2304, 9216, 26, 8, 262208, 131072, num_key_value_heads=4, head_dim=256),
        norms=4,
        query_key_norm="shared",
        tied=True,
    ),
    "phi": Family(
        split(True, True, "dense"),
        plain("fc1", "fc2"),
        sizes(2048, 8192, 24, 32, 51200, 2048),
        norms=1,
        norm_bias=True,
        head_bias=True,
        variant=variants.phi,
    ),
    "phi3": Family(
        fused("qkv_proj", "o_proj", False, False),
        fused_gated("gate_up_proj", "down_proj"),
        sizes(3072, 8192, 32, 32, 32064, 4096, sliding_window=None),
    ),
    "glm": Family(
        split("attention_bias", False),
        fused_gated("gate_up_proj", "down_proj"),
        sizes(4096, 13696, 40, 32, 151552, 131072, num_key_value_heads=2, head_dim=128, attention_bias=True),
    ),
    "glm4": Family(
        split("attention_bias", False),
        fused_gated("gate_up_proj", "down_proj"),
        sizes(4096, 13696, 40, 32, 151552, 131072, num_key_value_heads=2, head_dim=128, attention_bias=True),
        norms=4,
    ),
    "chatglm": Family(
        fused("query_key_value", "dense", "add_qkv_bias", "add_bias_linear"),
        fused_gated("dense_h_to_4h", "dense_4h_to_h", "add_bias_linear"),
        sizes(4096, 13696, 28, 32, 65024, 2048, head_dim=128),
        keys=_CHATGLM_NAMES,
        variant=variants.chatglm,
    ),
    "qwen": Family(
        fused("c_attn", "c_proj", True, False),
        gated(names=("w1", "w2", "c_proj")),
        sizes(4096, 22016, 32, 32, 151936, 8192, head_dim=128),
        keys={"head_dim": ("kv_channels",), "num_key_value_heads": ()},
        halved_ffn=True,
        variant=variants.qwen,
    ),
    "baichuan": Family(
        fused("W_pack", "o_proj", False, False),
        gated(),
        sizes(4096, 11008, 32, 32, 64000, 4096),
        keys={
            "num_key_value_heads": (),
            "head_dim": (),
            "max_position_embeddings": ("max_position_embeddings", "model_max_length"),
        },
        variant=variants.baichuan,
    ),
    # This project's own class (tasks/trainer/llama_alibi.py), which Baichuan-13B is converted to.
    "llama_alibi": Family(
        split("attention_bias", "attention_bias"),
        gated("mlp_bias"),
        sizes(4096, 11008, 32, 32, 32000, 2048),
        position="alibi",
    ),
    "bloom": Family(
        fused("query_key_value", "dense", True, True),
        plain("dense_h_to_4h", "dense_4h_to_h"),
        sizes(64, None, 2, 8, 250880, 2048),
        keys=_BLOOM_NAMES,
        outer_norms=2,
        norm_bias=True,
        position="alibi",
        tied=True,
    ),
    "gpt2": Family(
        fused("c_attn", "c_proj", True, True),
        plain("c_fc", "c_proj"),
        sizes(768, None, 12, 12, 50257, 1024),
        keys=_GPT_NAMES,
        norm_bias=True,
        position="learned",
        tied=True,
    ),
    "gpt_neox": Family(
        fused("query_key_value", "dense", "attention_bias", "attention_bias"),
        plain("dense_h_to_4h", "dense_4h_to_h"),
        sizes(6144, 24576, 44, 64, 50432, 2048, attention_bias=True),
        keys={"num_key_value_heads": ()},
        norm_bias=True,
    ),
    "mpt": Family(
        fused("Wqkv", "out_proj", False, False),
        plain("up_proj", "down_proj", False),
        sizes(2048, None, 24, 16, 50368, 2048),
        keys=_MPT_NAMES,
        position="alibi",
        tied=True,
    ),
    "opt": Family(
        split("enable_bias", "enable_bias", "out_proj"),
        plain("fc1", "fc2", "enable_bias"),
        sizes(768, 3072, 12, 12, 50272, 2048, enable_bias=True),
        keys={"intermediate_size": ("ffn_dim",), "num_key_value_heads": ()},
        norm_bias=True,
        position="learned",
        position_offset=2,
        tied=True,
        variant=variants.opt,
    ),
    "falcon": Family(
        fused("query_key_value", "dense", "bias", "bias"),
        plain("dense_h_to_4h", "dense_4h_to_h", "bias"),
        sizes(4544, None, 32, 71, 65024, 2048),
        keys={"intermediate_size": ("ffn_hidden_size",), "num_key_value_heads": (), "head_dim": ()},
        norm_bias=True,
        tied=True,
        variant=variants.falcon,
    ),
    "stablelm": Family(
        split("use_qkv_bias", False),
        gated(),
        sizes(2560, 6912, 32, 32, 50304, 4096, num_key_value_heads=32),
        norm_bias=True,
        variant=variants.stablelm,
    ),
}
