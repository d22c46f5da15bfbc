"""Small checkpoints with the tensor names and shapes that Qwen-1, Baichuan and ChatGLM2/3 were published with."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, HEADS, HEAD, LAYERS, FFN, GROUPS = 32, 4, 8, 2, 24, 2
Weights = dict[str, torch.Tensor]

QWEN = {
    "model_type": "qwen",
    "architectures": ["QWenLMHeadModel"],
    "auto_map": {"AutoModelForCausalLM": "modeling_qwen.QWenLMHeadModel"},
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "kv_channels": HEAD,
    "layer_norm_epsilon": 1e-3,
    "rotary_emb_base": 500,
    "rotary_pct": 1.0,
    "max_position_embeddings": 8192,
    "seq_length": 64,
    "no_bias": True,
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
    "tie_word_embeddings": False,
    "vocab_size": 480,
}
BAICHUAN = {
    "model_type": "baichuan",
    "architectures": ["BaiChuanForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": False,
    "vocab_size": 600,
}
BAICHUAN2 = {**BAICHUAN, "architectures": ["BaichuanForCausalLM"], "z_loss_weight": 0}
# Six heads, so that slopes are no plain geometric series, as with the published 40. Only the number of its tokens tells
# the first 13B from the second where that leaves out z_loss_weight, which it never does.
BAICHUAN_13B = {
    "model_type": "baichuan",
    "architectures": ["BaichuanForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_baichuan.BaichuanConfig",
        "AutoModelForCausalLM": "modeling_baichuan.BaichuanForCausalLM",
    },
    "bos_token_id": 1,
    "eos_token_id": 2,
    "gradient_checkpointing": False,
    "hidden_act": "silu",
    "hidden_size": 6 * HEAD,
    "initializer_range": 0.02,
    "intermediate_size": FFN,
    "model_max_length": 64,
    "num_attention_heads": 6,
    "num_hidden_layers": LAYERS,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 64000,
}
BAICHUAN2_13B = {**BAICHUAN_13B, "z_loss_weight": 0, "vocab_size": 600}
CHATGLM3 = {
    "model_type": "chatglm",
    "_name_or_path": "THUDM/chatglm3-6b",
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False,
    "ffn_hidden_size": FFN,
    "hidden_size": HIDDEN,
    "kv_channels": HEAD,
    "layernorm_epsilon": 1e-3,
    "multi_query_attention": True,
    "multi_query_group_num": GROUPS,
    "num_attention_heads": HEADS,
    "num_layers": LAYERS,
    "original_rope": True,
    "padded_vocab_size": 640,
    "post_layer_norm": True,
    "rmsnorm": True,
    "seq_length": 64,
    "tie_word_embeddings": False,
}
CHATGLM2 = {**CHATGLM3, "_name_or_path": "THUDM/chatglm2-6b"}
CHATGLM3_LONG = {**CHATGLM3, "rope_ratio": 50}
CONFIGS = {
    "qwen": QWEN,
    "baichuan": BAICHUAN,
    "baichuan2": BAICHUAN2,
    "baichuan-13b": BAICHUAN_13B,
    "baichuan2-13b": BAICHUAN2_13B,
    "chatglm2": CHATGLM2,
    "chatglm3": CHATGLM3,
    "chatglm3-long": CHATGLM3_LONG,
}
NATIVE = {
    "qwen": "qwen2",
    "baichuan": "llama",
    "baichuan2": "llama",
    "baichuan-13b": "llama_alibi",
    "baichuan2-13b": "llama_alibi",
    "chatglm2": "glm",
    "chatglm3": "glm",
    "chatglm3-long": "glm",
}


# --- published layouts --------------------------------------------------------------------------


def shapes(kind: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes as in the published weight files."""
    config, found = CONFIGS[kind], {}
    if kind == "qwen":
        rows = config["vocab_size"]
        found = {"transformer.wte.weight": (rows, HIDDEN), "lm_head.weight": (rows, HIDDEN)}
        found["transformer.ln_f.weight"] = (HIDDEN,)
        for n in range(LAYERS):
            own = {
                "ln_1.weight": (HIDDEN,),
                "ln_2.weight": (HIDDEN,),
                "attn.c_attn.weight": (3 * HIDDEN, HIDDEN),
                "attn.c_attn.bias": (3 * HIDDEN,),
                "attn.c_proj.weight": (HIDDEN, HIDDEN),
                "mlp.w1.weight": (FFN, HIDDEN),
                "mlp.w2.weight": (FFN, HIDDEN),
                "mlp.c_proj.weight": (HIDDEN, FFN),
            }
            found |= {f"transformer.h.{n}.{name}": shape for name, shape in own.items()}
        return found
    if kind.startswith("baichuan"):
        return _baichuan_shapes(config)
    return _chatglm_shapes(config)


def _baichuan_shapes(config: dict[str, object]) -> dict[str, tuple[int, ...]]:
    rows, hidden = config["vocab_size"], config["hidden_size"]
    rotates = {"self_attn.rotary_emb.inv_freq": (HEAD // 2,)} if "max_position_embeddings" in config else {}
    found = {"model.embed_tokens.weight": (rows, hidden), "lm_head.weight": (rows, hidden)}
    found["model.norm.weight"] = (hidden,)
    for n in range(LAYERS):
        own = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.W_pack.weight": (3 * hidden, hidden),
            "self_attn.o_proj.weight": (hidden, hidden),
            **rotates,
            "mlp.gate_proj.weight": (FFN, hidden),
            "mlp.up_proj.weight": (FFN, hidden),
            "mlp.down_proj.weight": (hidden, FFN),
        }
        found |= {f"model.layers.{n}.{name}": shape for name, shape in own.items()}
    return found


def _chatglm_shapes(config: dict[str, object]) -> dict[str, tuple[int, ...]]:
    rows, packed = config["padded_vocab_size"], HEADS * HEAD + 2 * GROUPS * HEAD
    found = {
        "transformer.embedding.word_embeddings.weight": (rows, HIDDEN),
        "transformer.rotary_pos_emb.inv_freq": (HEAD // 4,),
        "transformer.encoder.final_layernorm.weight": (HIDDEN,),
        "transformer.output_layer.weight": (rows, HIDDEN),
    }
    for n in range(LAYERS):
        own = {
            "input_layernorm.weight": (HIDDEN,),
            "post_attention_layernorm.weight": (HIDDEN,),
            "self_attention.query_key_value.weight": (packed, HIDDEN),
            "self_attention.query_key_value.bias": (packed,),
            "self_attention.dense.weight": (HIDDEN, HIDDEN),
            "mlp.dense_h_to_4h.weight": (2 * FFN, HIDDEN),
            "mlp.dense_4h_to_h.weight": (HIDDEN, FFN),
        }
        found |= {f"transformer.encoder.layers.{n}.{name}": shape for name, shape in own.items()}
    return found


def random_weights(kind: str) -> Weights:
    """Large enough that every part shows in the logits."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator) * 0.2 + (len(shape) == 1 and "bias" not in name)
        for name, shape in shapes(kind).items()
    }


def write(
    folder: Path, kind: str, weights: Weights | None = None, files: int = 1, suffix: str = "safetensors"
) -> Path:
    """A folder as published: config, tokenizer, and the weights in `files` files, with an index if there are many."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = weights or random_weights(kind)
    (folder / "config.json").write_text(json.dumps(CONFIGS[kind] | {"torch_dtype": "float32"}))
    (folder / "generation_config.json").write_text(
        json.dumps({"chat_format": "x", "do_sample": True, "top_p": 0.8})
    )
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    names, placed = list(weights), {}
    for number in range(files):
        part = {name: weights[name].clone() for name in names[number::files]}
        file = f"{stem}-{number + 1:05}-of-{files:05}.{suffix}" if files > 1 else f"{stem}.{suffix}"
        if suffix == "safetensors":
            save_file(part, folder / file)
        else:
            torch.save(part, folder / file)
        placed |= dict.fromkeys(part, file)
    if files > 1:
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": placed}))
    if kind == "qwen":
        write_tiktoken(folder / "qwen.tiktoken")
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "QWenTokenizer"}))
    else:
        write_sentencepiece(folder / "tokenizer.model", dummy_prefix=not kind.startswith("baichuan2"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "OwnTokenizer"}))
    return folder


TEXT = (
    "the cat sat on the mat and the hat",
    "你好，今天天气很好。天气好吗？",
    "numbers 12 345 and words: hello world, hello there",
    "问：你好吗 答：我很好",
)


def write_tiktoken(file: Path) -> None:
    """All bytes, and what joins them: each later token is two earlier ones, as training makes them."""
    joins = [
        b"th",
        b"he",
        b"the",
        b" the",
        b"in",
        b" in",
        b"er",
        b"us",
        b"user",
        b"\xe4\xbd",
        b"\xe4\xbd\xa0",
        b"  ",
    ]
    tokens = [*(bytes([byte]) for byte in range(256)), *joins]
    file.write_text(
        "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    )


def write_sentencepiece(file: Path, dummy_prefix: bool = True, kind: str = "bpe") -> None:
    """BPE over bytes where a character is unknown, with reserved pieces up to number 202, as Baichuan's has."""
    import sentencepiece

    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT * 20),
        model_writer=made,
        vocab_size=560,
        model_type=kind,
        byte_fallback=True,
        character_coverage=0.98,
        add_dummy_prefix=dummy_prefix,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        user_defined_symbols=[f"<reserved_{number}>" for number in range(200)],
        minloglevel=2,
    )
    file.write_bytes(made.getvalue())
