"""What a row's answer follows, to be written for an answer as it was written for learning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any

from transformers import PreTrainedTokenizerBase

from tasks.data.image_turns import text_of
from tasks.data.rows import Row


@dataclass(frozen=True)
class Prompt:
    """`messages` are written by the chat template, which is told of `tools`; a `text` stands as it is, without one."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[Any] | None = None
    text: str | None = None

    @classmethod
    def read(cls, text: str) -> Prompt | None:
        """The inverse of `prompt_of`."""
        found: Any = json.loads(text)
        if isinstance(found, list):  # as it stood there before prompts had tools
            return cls(found) if found else None
        return cls(**found) if found else None

    @property
    def shown(self) -> str:
        """Its turns' texts, or itself."""
        if self.text is not None:
            return self.text
        return "\n".join(text_of(message["content"]) for message in self.messages)


def prompt_of(row: Row, told: list[dict[str, Any]] | None = None) -> str:
    """The row's prompt as JSON; {} for a plain text, all of which is learnt: nothing stands before it.

    Args:
        told: its turns as the template takes them, where pictures make them others.
    """
    if row.kind == "text":
        return "{}"
    if row.kind == "completion":
        turns = (message["content"] for message in told) if told else (text for _, text in row.messages[:-1])
        return f'{{"text": {encode_basestring("".join(turns))}}}'
    tools = f', "tools": {row.tools}' if row.tools else ""
    messages = json.dumps(told, ensure_ascii=False) if told else row.prompt_json
    return f'{{"messages": {messages}{tools}}}'


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids of each up to where its answer begins: those that a row of this prompt is learnt with.

    The template alone writes a conversation's begin token; a text gets what the tokenizer puts before one.
    """
    if not prompts:
        return []
    texts = [_text(tokenizer, prompt) for prompt in prompts]
    encoded = [list(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    if all(prompt.text is None for prompt in prompts):
        return encoded
    from tasks.data.rendering import begin_ids

    begin = begin_ids(tokenizer)
    return [
        ids if prompt.text is None or ids[: len(begin)] == begin else [*begin, *ids]
        for prompt, ids in zip(prompts, encoded, strict=True)
    ]


def _text(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str:
    if prompt.text is not None:
        return prompt.text
    return str(
        tokenizer.apply_chat_template(
            prompt.messages, tools=prompt.tools, tokenize=False, add_generation_prompt=True
        )
    )
