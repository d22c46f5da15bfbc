"""Published models by short name: what their config.json says of sizes, so that planning needs no network."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from tasks.errors import UserError

Config = Mapping[str, object]


def _decoder(
    model_type: str,
    hidden: int,
    ffn: int,
    layers: int,
    heads: int,
    keys: int,
    vocab: int,
    positions: int,
    **more: object,
) -> Config:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        **more,
    }


TIED = {"tie_word_embeddings": True}
_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
_GRID = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


def _llava(model_type: str, text: Config, **more: object) -> Config:
    return {
        "model_type": model_type,
        "vision_config": _CLIP,
        "text_config": text,
        "vision_feature_layer": -2,
        **more,
    }


def _qwen(hidden: int, ffn: int, layers: int, heads: int, vocab: int) -> Config:
    """The first Qwen: its intermediate_size counts both up projections."""
    return {
        "model_type": "qwen",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "kv_channels": 128,
        "max_position_embeddings": 8192,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
    }


_VICUNA_7B = _decoder("llama", 4096, 11008, 32, 32, 32, 32064, 4096)
_MISTRAL_7B = _decoder("mistral", 4096, 14336, 32, 32, 8, 32000, 32768, sliding_window=4096)
_BLOOM = {"model_type": "bloom", "seq_length": 2048, "vocab_size": 250880}
_BAICHUAN = {"model_type": "baichuan", "tie_word_embeddings": False}

# Sizes as in the config.json of each model's page at Hugging Face. mistral-7b's window is left as v0.1 has it.
KNOWN: dict[str, Config] = {
    "smollm2-135m": _decoder("llama", 576, 1536, 30, 9, 3, 49152, 8192, **TIED),
    "smollm2-1.7b": _decoder("llama", 2048, 8192, 24, 32, 32, 49152, 8192, **TIED),
    "llama-3.2-1b": _decoder("llama", 2048, 8192, 16, 32, 8, 128256, 131072, head_dim=64, **TIED),
    "llama-3.2-3b": _decoder("llama", 3072, 8192, 28, 24, 8, 128256, 131072, head_dim=128, **TIED),
    "llama-2-7b": _decoder("llama", 4096, 11008, 32, 32, 32, 32000, 4096),
    "llama-2-13b": _decoder("llama", 5120, 13824, 40, 40, 40, 32000, 4096),
    "llama-2-70b": _decoder("llama", 8192, 28672, 80, 64, 8, 32000, 4096),
    "llama-3.1-8b": _decoder("llama", 4096, 14336, 32, 32, 8, 128256, 131072),
    "llama-3.1-70b": _decoder("llama", 8192, 28672, 80, 64, 8, 128256, 131072),
    "llama-3.1-405b": _decoder("llama", 16384, 53248, 126, 128, 8, 128256, 131072),
    "mistral-7b": _MISTRAL_7B,
    "mixtral-8x7b": _decoder(
        "mixtral", 4096, 14336, 32, 32, 8, 32000, 32768, num_local_experts=8, num_experts_per_tok=2
    ),
    "qwen-7b": _qwen(4096, 22016, 32, 32, 151936),
    "qwen-14b": _qwen(5120, 27392, 40, 40, 152064),
    "qwen2.5-0.5b": _decoder("qwen2", 896, 4864, 24, 14, 2, 151936, 32768, **TIED),
    "qwen2.5-1.5b": _decoder("qwen2", 1536, 8960, 28, 12, 2, 151936, 131072, **TIED),
    "qwen2.5-3b": _decoder("qwen2", 2048, 11008, 36, 16, 2, 151936, 32768, **TIED),
    "qwen2.5-7b": _decoder("qwen2", 3584, 18944, 28, 28, 4, 152064, 131072),
    "qwen2.5-14b": _decoder("qwen2", 5120, 13824, 48, 40, 8, 152064, 131072),
    "qwen2.5-32b": _decoder("qwen2", 5120, 27648, 64, 40, 8, 152064, 131072),
    "qwen2.5-72b": _decoder("qwen2", 8192, 29568, 80, 64, 8, 152064, 131072),
    "qwen3-4b": _decoder("qwen3", 2560, 9728, 36, 32, 8, 151936, 40960, head_dim=128, **TIED),
    "qwen3-8b": _decoder("qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, head_dim=128),
    "baichuan2-7b": {
        **_BAICHUAN,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
        "vocab_size": 125696,
    },
    "baichuan2-13b": {
        **_BAICHUAN,
        "hidden_size": 5120,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "vocab_size": 125696,
    },
    "bloom-560m": {**_BLOOM, "hidden_size": 1024, "n_layer": 24, "num_attention_heads": 16},
    "bloom-7b1": {**_BLOOM, "hidden_size": 4096, "n_layer": 30, "num_attention_heads": 32},
    "chatglm3-6b": {
        "model_type": "chatglm",
        "hidden_size": 4096,
        "ffn_hidden_size": 13696,
        "num_layers": 28,
        "num_attention_heads": 32,
        "kv_channels": 128,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "padded_vocab_size": 65024,
        "seq_length": 8192,
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "tie_word_embeddings": False,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "vocab_size": 50257,
        "n_positions": 1024,
    },
    "gemma-2-9b": _decoder("gemma2", 3584, 14336, 42, 16, 8, 256000, 8192, head_dim=256, **TIED),
    "llava-1.5-7b": _llava("llava", _VICUNA_7B),
    "llava-v1.6-vicuna-7b": _llava("llava_next", _VICUNA_7B, image_grid_pinpoints=_GRID),
}


ALIASES = {
    "llava-v1.6-7b": "llava-v1.6-vicuna-7b",
    "llava-1.6-7b": "llava-v1.6-vicuna-7b",
    "gpt2-124m": "gpt2",
}


def known_config(name: str) -> Config | None:
    """The config behind a short name, in any case; None if there is none."""
    name = name.lower()
    return KNOWN.get(ALIASES.get(name, name))


def unknown_model(name: str) -> UserError:
    """What to say of a name that is neither known nor found."""
    near = difflib.get_close_matches(name.lower().split("/")[-1], [*KNOWN, *ALIASES], n=3, cutoff=0.5)
    return UserError(
        f"--model {name} is no folder, no config.json and no name known here"
        f"{' (near it: ' + ', '.join(near) + ')' if near else ''}; give a path, a Hugging Face id as owner/name, or "
        f"one of {', '.join(KNOWN)}"
    )
