"""Small configs that try every option of a family, and the real model of a config."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import tasks.trainer.llama_alibi  # noqa: F401 (which makes the class known to transformers)

TINY = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 101,
}
EXPERTS = {
    **TINY,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
}
GPT = {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 60, "vocab_size": 101}
LATENT = {
    **TINY,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 8,
    "kv_lora_rank": 12,
    "q_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
    "first_k_dense_replace": 1,
}
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
    "model_type": "clip_vision_model",
}
QWEN2_TEXT = {"model_type": "qwen2", **TINY, "num_key_value_heads": 2}

# What a config can change of a family, one at a time; the defaults of every family are tried besides.
VARIANTS = [
    {"model_type": "llama", **TINY, "num_key_value_heads": None, "head_dim": None},
    {"model_type": "llama", **TINY, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    {"model_type": "llama", **TINY, "head_dim": 10, "tie_word_embeddings": True},
    {"model_type": "mistral", **TINY, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": None},
    {"model_type": "qwen2", **TINY, "num_key_value_heads": 2, "use_sliding_window": True},
    {"model_type": "qwen3", **TINY, "num_key_value_heads": 2, "attention_bias": True},
    {"model_type": "mixtral", **TINY, "num_key_value_heads": 2, "num_local_experts": 3, "sliding_window": 7},
    {"model_type": "qwen2_moe", **EXPERTS, "shared_expert_intermediate_size": 12, "qkv_bias": False},
    {"model_type": "qwen2_moe", **EXPERTS, "mlp_only_layers": [0], "decoder_sparse_step": 2},
    {"model_type": "qwen3_moe", **EXPERTS, "head_dim": 8, "mlp_only_layers": [3]},
    {"model_type": "qwen3_moe", **EXPERTS, "decoder_sparse_step": 5},
    {"model_type": "deepseek_v3", **LATENT, "attention_bias": True, "n_shared_experts": 2},
    {"model_type": "deepseek_v3", **LATENT, "q_lora_rank": None},
    {"model_type": "gemma", **TINY, "num_key_value_heads": 1, "attention_bias": True},
    {"model_type": "gemma2", **TINY, "num_key_value_heads": 1, "head_dim": 6},
    {"model_type": "gemma3_text", **TINY, "num_key_value_heads": 2, "tie_word_embeddings": False},
    {"model_type": "phi", **TINY, "num_key_value_heads": 2, "qk_layernorm": True},
    {"model_type": "phi3", **TINY, "num_key_value_heads": 2, "sliding_window": 2047, "pad_token_id": 0},
    {"model_type": "glm", **TINY, "head_dim": 6, "attention_bias": False, "pad_token_id": 0},
    {"model_type": "glm4", **TINY, "head_dim": 6, "pad_token_id": 0},
    {"model_type": "bloom", "n_embed": 24, "n_layer": 3, "n_head": 4, "vocab_size": 101},
    {"model_type": "gpt2", **GPT, "n_inner": 31, "tie_word_embeddings": False},
    {"model_type": "gpt2", **GPT, "n_inner": None},
    {"model_type": "gpt_neox", **TINY, "attention_bias": False},
    {"model_type": "mpt", "d_model": 24, "n_heads": 4, "n_layers": 3, "vocab_size": 101},
    {"model_type": "opt", "hidden_size": 24, "ffn_dim": 40, "num_attention_heads": 4, "enable_bias": False},
    {"model_type": "opt", "hidden_size": 24, "num_attention_heads": 4, "do_layer_norm_before": False},
    {
        "model_type": "opt",
        "hidden_size": 24,
        "num_attention_heads": 4,
        "layer_norm_elementwise_affine": False,
    },
    {"model_type": "falcon", **TINY, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    {"model_type": "falcon", **TINY, "multi_query": False, "parallel_attn": False, "alibi": True},
    {"model_type": "stablelm", **TINY, "num_key_value_heads": 2, "qk_layernorm": True, "use_qkv_bias": True},
    {"model_type": "stablelm", **TINY, "num_key_value_heads": 4, "use_parallel_residual": True},
    {
        "model_type": "llava",
        "text_config": {**QWEN2_TEXT, "tie_word_embeddings": True},
        "vision_config": TOWER,
    },
    {"model_type": "llava", "text_config": TINY, "vision_config": {}, "vision_feature_layer": [-2, 1]},
    {
        "model_type": "llava_next",
        "text_config": TINY,
        "vision_config": TOWER,
        "multimodal_projector_bias": False,
    },
    {"model_type": "llava_next"},
]


def real_model(config: dict) -> torch.nn.Module:
    """The transformers model of a config, on the meta device."""
    whole = AutoConfig.for_model(**config)
    kind = AutoModelForImageTextToText if hasattr(whole, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"):
        return kind.from_config(whole)
