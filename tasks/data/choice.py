"""Which chat template conversations are written by: the tokenizer's own, its family's, or one that the user names."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jinja2
from transformers import PreTrainedTokenizerBase

from tasks.data.prompts import PROMPTS
from tasks.data.rendering import finished
from tasks.errors import UserError

OWN = "the tokenizer's own"
JINJA = (".jinja", ".jinja2")
Chooser = Callable[[PreTrainedTokenizerBase, str], tuple[str, str]]


@dataclass(frozen=True)
class Choice:
    """The template to use, what it is called, and why it was taken."""

    name: str
    text: str
    evidence: str


def _of_llama(tokenizer: PreTrainedTokenizerBase, name: str) -> tuple[str, str]:
    vocabulary = tokenizer.get_vocab()
    if "<|start_header_id|>" in vocabulary:
        return "llama3", "model_type is llama and <|start_header_id|> is in the vocabulary"
    if "<|im_start|>" in vocabulary:
        return "chatml", "model_type is llama and <|im_start|> is in the vocabulary"
    if "vicuna" in name.lower():
        return "vicuna", "the model is called vicuna"
    return "llama2", "model_type is llama and the vocabulary has neither Llama 3's nor ChatML's tokens"


def _of_mistral(tokenizer: PreTrainedTokenizerBase, name: str) -> tuple[str, str]:
    vocabulary = tokenizer.get_vocab()
    if "[INST]" not in vocabulary:
        return "mistral", "model_type is mistral and [INST] is no token"
    if "\u2581" in vocabulary:
        return "mistral-v3", "model_type is mistral and [INST] is a token"
    return "mistral-tekken", "model_type is mistral, [INST] is a token and the vocabulary is one of bytes"


def _of_baichuan(tokenizer: PreTrainedTokenizerBase, name: str) -> tuple[str, str]:
    opens = str(tokenizer.convert_ids_to_tokens(195)) if len(tokenizer) > 195 else ""
    known = {"<reserved_102>": "baichuan", "<reserved_106>": "baichuan2"}
    if opens in known:
        return known[opens], f"model_type is baichuan and token 195 is {opens}"
    second = len(tokenizer) > 100_000
    return ("baichuan2" if second else "baichuan"), f"model_type is baichuan, of {len(tokenizer)} tokens"


def _always(name: str) -> Chooser:
    return lambda tokenizer, model: (name, "")


# model_type -> (prompt's name, evidence or "" where the model_type is all of it)
FAMILIES: dict[str, Chooser] = {
    "llama": _of_llama,
    "mistral": _of_mistral,
    "mixtral": _of_mistral,
    "bloom": _always("alpaca"),
    "baichuan": _of_baichuan,
    "chatglm": _always("chatglm3"),
    "glm": _always("glm4"),
    "glm4": _always("glm4"),
    **dict.fromkeys(
        ("qwen", "qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_moe"), _always("qwen")
    ),
}


# Vision-language models, which are prompted as the language model inside them is.
WITH_PICTURES = ("llava", "llava_next")


def _of_pictures(tokenizer: PreTrainedTokenizerBase, name: str, inner: str) -> tuple[str, str]:
    if inner == "mistral":
        return _of_mistral(tokenizer, name)
    if "<|im_start|>" in tokenizer.get_vocab():  # Yi's and Qwen's
        return "chatml", "<|im_start|> is in the vocabulary"
    return "vicuna", ""


def choose(
    wanted: str, tokenizer: PreTrainedTokenizerBase, folder: Path, name: str, root: Path
) -> Choice | None:
    """The template that `prepare_data.template` asks for; None if nothing is known for "auto".

    Args:
        folder: where the model's config.json lies.
        name: what the user calls the model.
        root: what a .jinja file's path is relative to.

    Raises:
        UserError: no such prompt or file, or one that this tokenizer cannot write.
    """
    if wanted != "auto":
        if wanted.endswith(JINJA):
            text = _read(root / Path(wanted).expanduser(), wanted)
            return _checked(Choice(wanted, text, "params.yaml names the file"), tokenizer)
        if wanted not in PROMPTS:
            raise UserError(
                f"prepare_data.template={wanted} is unknown; use auto, a .jinja file, or {', '.join(PROMPTS)}"
            )
        return _written(wanted, "params.yaml says so", tokenizer, name)
    if tokenizer.chat_template:
        return _checked(Choice(OWN, tokenizer.get_chat_template(), "it comes with one"), tokenizer)
    kind, inner = _model_types(folder)
    if kind in FAMILIES or kind in WITH_PICTURES:
        known = FAMILIES[kind](tokenizer, name) if kind in FAMILIES else _of_pictures(tokenizer, name, inner)
        prompt, evidence = known
        return _written(prompt, evidence or f"model_type is {kind}", tokenizer, name)
    if {"<|im_start|>", "<|im_end|>"} <= tokenizer.get_vocab().keys():
        return _written("chatml", "<|im_start|> and <|im_end|> are in the vocabulary", tokenizer, name)
    return None


def _model_types(folder: Path) -> tuple[str, str]:
    """The model's, and that of the language model inside one that sees pictures."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return str(config.get("model_type", "")), str((config.get("text_config") or {}).get("model_type", ""))


def _read(file: Path, wanted: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"prepare_data.template={wanted} cannot be read ({error}); give the path of a Jinja file in UTF-8"
        ) from None


def _written(prompt: str, evidence: str, tokenizer: PreTrainedTokenizerBase, name: str) -> Choice:
    known, vocabulary = PROMPTS[prompt], tokenizer.get_vocab()
    missing = [token for token in known.needs if token not in vocabulary]
    missing += [
        token
        for token in ("bos_token", "eos_token")
        if token in known.text and getattr(tokenizer, token) is None
    ]
    if missing:
        others = ", ".join(other for other in PROMPTS if other != prompt)
        raise UserError(
            f"the prompt {prompt} ({evidence}) needs {', '.join(missing)}, which the tokenizer of {name} lacks; "
            f"set prepare_data.template to a .jinja file or another of {others}"
        )
    return _checked(Choice(prompt, known.text, f"{evidence}; as in {known.source}"), tokenizer)


def _checked(choice: Choice, tokenizer: PreTrainedTokenizerBase) -> Choice:
    """The choice with its template finished.

    Raises:
        UserError: it is no Jinja, or cannot write a question with its answer.
    """
    try:
        return Choice(choice.name, finished(tokenizer, choice.text), choice.evidence)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(
            f"the chat template ({choice.name}) is no Jinja at line {error.lineno} ({error.message}); mend it"
        ) from None
    except UserError as error:
        raise UserError(f"the chat template ({choice.name}): {error}") from None
