"""Baichuan 1 and 2 (model_type baichuan): W_pack is query, key and value one below the other.

The 7B models rotate and become llama; the 13B models have ALiBi and become llama_alibi, this project's own class.
Baichuan2's head is used with rows of length one. Llama's head cannot, so a 7B's rows are made so once, here; a 13B's
are kept as they are, and used so. In an export they have length one: the published class changes nothing on them
then, and llama.cpp, which takes rows as they are, computes the same. Layout as in the published modeling_baichuan.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tasks.trainer.legacy.table import Change, Family, Native, Rule, Settings

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

VOCABULARY = {64000: 1, 125696: 2}
USER, ASSISTANT = 195, 196
LAYER = "model.layers.{n}."


def version(settings: Settings) -> int:
    """1 or 2, which says whether the head is normalised.

    Raises:
        UserError: the config does not tell.
    """
    if "z_loss_weight" in settings.values:
        return 2
    if settings.values.get("architectures") == ["BaiChuanForCausalLM"]:
        return 1
    known = VOCABULARY.get(settings.count("vocab_size"))
    if known is None:
        raise settings.refused(
            "vocab_size",
            "neither Baichuan's 64000 nor Baichuan2's 125696, so it is unknown whether the head is normalised",
            "put z_loss_weight: 0 into it if it comes from Baichuan2, architectures: [BaiChuanForCausalLM] if not",
        )
    return known


def native(settings: Settings) -> Native:
    """A 7B as llama, a 13B as llama_alibi.

    Raises:
        UserError: an option that neither has a counterpart of.
    """
    hidden = settings.count("hidden_size")
    settings.only("another activation", hidden_act="silu")
    settings.only("a head that is the embedding", tie_word_embeddings=False)
    settings.without("its weights are quantised", "quantization_config")
    heads = settings.count("num_attention_heads")
    if hidden % heads:
        raise settings.refused("hidden_size", f"must be divisible by num_attention_heads={heads}")
    second = version(settings) == 2
    config: dict[str, object] = {
        "vocab_size": settings.count("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": settings.count("intermediate_size"),
        "num_hidden_layers": settings.count("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "rms_norm_eps": settings.number("rms_norm_eps", 1e-6),
        "tie_word_embeddings": False,
    }
    # The 13B models' config class has model_max_length instead.
    if "max_position_embeddings" not in settings.values and hidden != 4096:
        length = settings.count("model_max_length", 4096)
        config |= {"model_type": "llama_alibi", "max_position_embeddings": length, "unit_head": second}
        return Native(config, _rules(hidden, back=_unit_rows if second else None), own=True)
    length = settings.count("max_position_embeddings", 4096)
    rotations = {"rope_type": "default", "rope_theta": 10000.0}
    config |= {"model_type": "llama", "max_position_embeddings": length, "rope_parameters": rotations}
    rules = _rules(hidden, change=_unit_rows if second else None)
    note = (
        "the head's rows were brought to length one, as Baichuan2 uses them; full tuning trains these rows as they "
        "are and does not bring them to length one again"
    )
    return Native(config, rules, (f"{LAYER}self_attn.rotary_emb.inv_freq",), (note,) * second)


def _rules(hidden: int, change: Change = None, back: Change = None) -> tuple[Rule, ...]:
    """`change` and `back` are the head's."""
    packed = Rule(
        f"{LAYER}self_attn.W_pack.weight",
        tuple(f"{LAYER}self_attn.{part}_proj.weight" for part in "qkv"),
        (hidden, hidden, hidden),
    )
    kept = (
        "model.embed_tokens.weight",
        f"{LAYER}self_attn.o_proj.weight",
        *(f"{LAYER}mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
        f"{LAYER}input_layernorm.weight",
        f"{LAYER}post_attention_layernorm.weight",
        "model.norm.weight",
    )
    head = Rule("lm_head.weight", ("lm_head.weight",), change=change, back=back)
    return (packed, head, *(Rule(name, (name,)) for name in kept))


def _unit_rows(weight: torch.Tensor) -> torch.Tensor:
    """Each row of (vocabulary, hidden) over its length, at most 1e-12, worked out in float32, a slice at a time."""
    from torch.nn.functional import normalize

    out = weight.clone()
    for rows in out.split(8192):
        rows.copy_(normalize(rows.float()))
    return out


def tokenizer(folder: Path, settings: Settings) -> PreTrainedTokenizerFast:
    """Turns are opened by two reserved tokens of the vocabulary, which a generation_config.json may name.

    An answer ends with the end token; the published prompt leaves it out between turns, the published training data
    has it where the model is to stop.

    Raises:
        UserError: no tokenizer.model, or one that cannot be converted.
    """
    from tasks.trainer.legacy.sentencepiece_file import Pieces, from_sentencepiece
    from tasks.trainer.legacy.table import read_object

    pieces = Pieces.read(folder / "tokenizer.model", settings.name)
    generation = folder / "generation_config.json"
    named = read_object(generation) if generation.is_file() else {}
    roles = [
        pieces.text(named.get("user_token_id", USER), settings.name),
        pieces.text(named.get("assistant_token_id", ASSISTANT), settings.name),
    ]
    begins = settings.tokenizer_config.get("add_bos_token", version(settings) == 1)
    fast = from_sentencepiece(pieces, settings.name, special=roles, begin=[pieces.bos] if begins else [])
    user, assistant = roles
    fast.chat_template = (
        "{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] }}"
        f"{{% elif message['role'] == 'user' %}}{user}{{{{ message['content'] }}}}"
        f"{{% elif message['role'] == 'assistant' %}}{assistant}{{{{ message['content'] }}}}{pieces.eos}"
        "{% else %}{{ raise_exception('Baichuan knows system, user and assistant alone') }}{% endif %}{% endfor %}"
        f"{{% if add_generation_prompt %}}{assistant}{{% endif %}}"
    )
    return fast


def ends(fast: PreTrainedTokenizerFast) -> list[int]:
    return [fast.eos_token_id]


FAMILY = Family("baichuan", native, tokenizer, ends, reads=("tokenizer.model",))
