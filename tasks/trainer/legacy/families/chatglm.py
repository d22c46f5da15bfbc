"""ChatGLM2 and ChatGLM3 (model_type chatglm) as glm: rotary positions, interleaved, on half of each head; grouped keys.

query_key_value holds all query heads, then the groups' keys, then their values; dense_h_to_4h holds gate, then up, as
glm's gate_up_proj does. Layout as in the published modeling_chatglm.py and tokenization_chatglm.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.errors import UserError
from tasks.trainer.legacy.table import Family, Native, Rule, Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

OLD, NEW = "transformer.encoder.layers.{n}.", "model.layers.{n}."
# Published as `sop` and `eop`; as words of a text these would be taken for the tokens, so they are spelt as in GLM-4.
MARKS = ("[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>")
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
# An answer ends with the end token. The published prompts leave it out between turns, where a next turn's opening
# stands; a model that is trained on one answer a row, as published, sees the same tokens.
ROUNDS = (
    "[gMASK]<sop>{% set count = namespace(rounds=0) %}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{% set count.rounds = count.rounds + 1 %}"
    "[Round {{ count.rounds }}]\n\n问：{{ message['content'] }}\n\n答："
    "{% elif message['role'] == 'assistant' %}{{ message['content'] }}</s>"
    "{% if not loop.last %}{{ '\\n\\n' }}{% endif %}"
    "{% else %}{{ raise_exception('ChatGLM2 knows user and assistant alone') }}{% endif %}{% endfor %}"
)
TURNS = (
    "[gMASK]<sop>{% for message in messages %}<|{{ message['role'] }}|>\n {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def generation(settings: Settings) -> int | None:
    """2 or 3 by the tokenizer's own config, then by the names the model goes under; None if nothing tells."""
    if "<|user|>" in json.dumps(settings.tokenizer_config, ensure_ascii=False):
        return 3
    names = (
        settings.tokenizer_config.get("name_or_path"),
        settings.values.get("_name_or_path"),
        settings.name,
    )
    for name in names:
        for words, number in ((("chatglm3",), 3), (("chatglm2", "codegeex2"), 2)):
            if any(word in str(name).lower() for word in words):
                return number
    return None


def native(settings: Settings) -> Native:
    """Raises UserError: the first ChatGLM, or an option that glm has no counterpart of."""
    settings.without("it belongs to the first ChatGLM-6B, another architecture", "inner_hidden_size")
    settings.only("glm has no such bias", add_bias_linear=False)
    settings.only("glm's norms are RMS norms before each part", rmsnorm=True, post_layer_norm=True)
    settings.only("glm adds what came before the norm", apply_residual_connection_post_layernorm=False)
    settings.only("glm's rotary positions are the original ones", original_rope=True)
    if not settings.flag("multi_query_attention", False):
        raise settings.refused("multi_query_attention", "heads with keys of their own are laid out otherwise")
    settings.only("a head that is the embedding", tie_word_embeddings=False)
    settings.without("its weights are quantised", "quantization_bit", "quantization_config")
    settings.without("a tuned prefix", "pre_seq_len")
    settings.without("a tower of its own", "vision_config")
    hidden, heads = settings.count("hidden_size"), settings.count("num_attention_heads")
    groups, head = settings.count("multi_query_group_num"), settings.count("kv_channels")
    if heads % groups:
        raise settings.refused("multi_query_group_num", f"must divide num_attention_heads={heads}")
    config = {
        "model_type": "glm",
        "vocab_size": settings.count("padded_vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": settings.count("ffn_hidden_size"),
        "num_hidden_layers": settings.count("num_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head,
        "attention_bias": settings.flag("add_qkv_bias", False),
        "max_position_embeddings": settings.count("seq_length"),
        "rms_norm_eps": settings.number("layernorm_epsilon", 1e-5),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": _theta(settings),
            "partial_rotary_factor": 0.5,
        },
        "tie_word_embeddings": False,
    }
    return Native(config, _rules(heads * head, groups * head), ("transformer.rotary_pos_emb.inv_freq",))


def _theta(settings: Settings) -> float:
    """The base of the rotary angles: rope_ratio stretches it in ChatGLM3, and positions in ChatGLM2."""
    ratio = settings.number("rope_ratio", 1.0)
    if ratio != 1.0 and generation(settings) != 3:
        raise settings.refused(
            "rope_ratio",
            "means something else in ChatGLM2 (glm cannot do it) than in ChatGLM3",
            "take ChatGLM3",
        )
    return 10000.0 * ratio


def _rules(query: int, group: int) -> tuple[Rule, ...]:
    packed = tuple(
        Rule(
            f"{OLD}self_attention.query_key_value.{kind}",
            tuple(f"{NEW}self_attn.{part}_proj.{kind}" for part in "qkv"),
            (query, group, group),
        )
        for kind in ("weight", "bias")
    )
    renamed = {
        "transformer.embedding.word_embeddings.weight": "model.embed_tokens.weight",
        f"{OLD}input_layernorm.weight": f"{NEW}input_layernorm.weight",
        f"{OLD}self_attention.dense.weight": f"{NEW}self_attn.o_proj.weight",
        f"{OLD}post_attention_layernorm.weight": f"{NEW}post_attention_layernorm.weight",
        f"{OLD}mlp.dense_h_to_4h.weight": f"{NEW}mlp.gate_up_proj.weight",
        f"{OLD}mlp.dense_4h_to_h.weight": f"{NEW}mlp.down_proj.weight",
        "transformer.encoder.final_layernorm.weight": "model.norm.weight",
        "transformer.output_layer.weight": "lm_head.weight",
    }
    return (*packed, *(Rule(old, (new,)) for old, new in renamed.items()))


def tokenizer(folder: Path, settings: Settings) -> PreTrainedTokenizerFast:
    """Raises UserError: nothing tells ChatGLM2 from 3, or its tokenizer.model is not sentencepiece's (GLM-4)."""
    from tasks.trainer.legacy.sentencepiece_file import Pieces, from_sentencepiece

    number = generation(settings)
    if number is None:
        raise UserError(
            f"nothing in {settings.name} tells ChatGLM2 from ChatGLM3, whose role tokens differ; put name_or_path: "
            "THUDM/chatglm3-6b (or chatglm2-6b) into its tokenizer_config.json"
        )
    pieces = Pieces.read(folder / "tokenizer.model", settings.name)
    added = (*MARKS, *(ROLES if number == 3 else ()))
    fast = from_sentencepiece(pieces, settings.name, added=added, begin=["[gMASK]", "<sop>"])
    fast.pad_token = pieces.unk
    fast.chat_template = (TURNS if number == 3 else ROUNDS).replace("</s>", pieces.eos)
    return fast


def ends(fast: PreTrainedTokenizerFast) -> list[int]:
    """ChatGLM3 answers may also end where another role would speak."""
    vocabulary = fast.get_vocab()
    return [
        fast.eos_token_id,
        *(vocabulary[role] for role in ("<|user|>", "<|observation|>") if role in vocabulary),
    ]


FAMILY = Family("chatglm", native, tokenizer, ends, reads=("tokenizer.model",))
