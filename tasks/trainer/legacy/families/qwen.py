"""Qwen-1 (model_type qwen) as qwen2: c_attn is query, key and value one below the other; silu acts on w2's output.

Layout and sizes as in the published modeling_qwen.py and tokenization_qwen.py of Qwen/Qwen-7B.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tasks.errors import UserError
from tasks.trainer.legacy.table import Family, Native, Rule, Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (END, START, STOP, *(f"<|extra_{number}|>" for number in range(205)))
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# ChatML with the system prompt that the published chat() takes where none is given.
TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OLD, NEW = "transformer.h.{n}.", "model.layers.{n}."


def native(settings: Settings) -> Native:
    """Raises UserError: an option that qwen2 has no counterpart of."""
    settings.only("a bias outside c_attn", no_bias=True)
    settings.only("rotary positions on a part of each head", rotary_pct=1.0)
    settings.only("attention without 1/sqrt(d)", scale_attn_weights=True)
    settings.only("qwen2's head would be cut from its embedding", tie_word_embeddings=False)
    settings.without("a tower of its own", "visual", "audio")
    settings.without("its weights are quantised", "quantization_config")
    hidden, heads = settings.count("hidden_size"), settings.count("num_attention_heads")
    if settings.count("kv_channels", 128) * heads != hidden:
        raise settings.refused("kv_channels", f"{heads} heads of it must make hidden_size={hidden}")
    ffn = settings.count("intermediate_size")
    if ffn % 2:
        raise settings.refused("intermediate_size", "counts w1 and w2 together, so it must be even")
    positions, notes = settings.count("max_position_embeddings", 8192), []
    stretched = [key for key in ("use_dynamic_ntk", "use_logn_attn") if settings.flag(key, False)]
    if stretched:
        positions = settings.count("seq_length", positions)
        notes.append(
            f"{' and '.join(stretched)} change nothing up to seq_length={positions} tokens and are left out: keep "
            "rows and answers within that"
        )
    config = {
        "model_type": "qwen2",
        "vocab_size": settings.count("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": ffn // 2,
        "num_hidden_layers": settings.count("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": positions,
        "rms_norm_eps": settings.number("layer_norm_epsilon", 1e-6),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": settings.number("rotary_emb_base", 10000.0),
        },
        "tie_word_embeddings": False,
    }
    dropped = ("transformer.rotary_emb.inv_freq", f"{OLD}attn.masked_bias", f"{OLD}attn.logn_tensor")
    return Native(config, _rules(hidden), dropped, tuple(notes))


def _rules(hidden: int) -> tuple[Rule, ...]:
    packed = tuple(
        Rule(
            f"{OLD}attn.c_attn.{kind}",
            tuple(f"{NEW}self_attn.{part}_proj.{kind}" for part in "qkv"),
            (hidden, hidden, hidden),
        )
        for kind in ("weight", "bias")
    )
    renamed = {
        "transformer.wte.weight": "model.embed_tokens.weight",
        f"{OLD}ln_1.weight": f"{NEW}input_layernorm.weight",
        f"{OLD}attn.c_proj.weight": f"{NEW}self_attn.o_proj.weight",
        f"{OLD}ln_2.weight": f"{NEW}post_attention_layernorm.weight",
        f"{OLD}mlp.w1.weight": f"{NEW}mlp.up_proj.weight",
        f"{OLD}mlp.w2.weight": f"{NEW}mlp.gate_proj.weight",
        f"{OLD}mlp.c_proj.weight": f"{NEW}mlp.down_proj.weight",
        "transformer.ln_f.weight": "model.norm.weight",
        "lm_head.weight": "lm_head.weight",
    }
    return (*packed, *(Rule(old, (new,)) for old, new in renamed.items()))


def tokenizer(folder: Path, settings: Settings) -> PreTrainedTokenizerFast:
    """Raises UserError: no qwen.tiktoken, or one with gaps, so that the special tokens' ids are unknown."""
    from tasks.trainer.legacy.tiktoken_file import from_tiktoken

    file = folder / "qwen.tiktoken"
    if not file.is_file():
        raise UserError(f"{settings.name} has no qwen.tiktoken, its tokenizer; copy it beside config.json")
    fast = from_tiktoken(file, WORDS, SPECIALS, nfc=True)
    fast.eos_token, fast.pad_token = STOP, END
    fast.chat_template = TEMPLATE
    return fast


def ends(fast: PreTrainedTokenizerFast) -> list[int]:
    return [fast.convert_tokens_to_ids(token) for token in (STOP, END)]


FAMILY = Family("qwen", native, tokenizer, ends, reads=("*.tiktoken",))
