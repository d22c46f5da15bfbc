"""Conversation -> token ids and labels, by the tokenizer's own chat template."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tasks.data.rows import BadRow, Row
from tasks.errors import UserError

IGNORED = -100


@dataclass(frozen=True)
class Encoded:
    """`input_ids` and `labels` have equal length; a label of -100 is not learnt."""

    input_ids: list[int]
    labels: list[int]
    truncated: bool


def load_tokenizer(folder: Path, name: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer of the model called `name`, whose files lie in `folder`.

    Args:
        trust_remote_code: run a tokenizer's own code, which lies in `folder` too.

    Raises:
        UserError: there is none, or it cannot serve: no chat template, or no offsets; or it needs its own code.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise UserError(
                f"model.name_or_path={name} comes with a tokenizer in Python code of its own, and that is not run "
                "unasked; read its *.py files, then set model.trust_remote_code: true"
            ) from None
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"model.name_or_path={name} has no tokenizer that can be loaded ({reason.rstrip('.')}); "
            "put tokenizer.json and tokenizer_config.json beside its config.json"
        ) from None
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer of {name} has no chat template, so it is unknown where an answer begins; "
            "use an instruct model, or put a chat_template.jinja beside its tokenizer"
        )
    if not tokenizer.is_fast:
        raise UserError(f"the tokenizer of {name} gives no character offsets; convert it to tokenizer.json")
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, row: Row, max_length: int) -> Encoded:
    """Ids of the whole rendered text (at most `max_length`), labels on the answers and their end marks.

    The template alone writes the begin token, as it does when an answer is generated, so none is added.
    Where each answer lies is found by rendering the conversation up to it, which must be a beginning of
    the whole.

    Raises:
        BadRow: the template refuses the conversation, or no learnt token is within `max_length`.
    """
    messages = [{"role": role, "content": content} for role, content in row.messages]
    whole = _render(tokenizer, messages, False)
    encoding = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    spans = _answer_spans(tokenizer, messages, whole)
    labels = [
        token if any(start < end_ and begin < end for begin, end_ in spans) else IGNORED
        for token, (start, end) in zip(encoding["input_ids"], encoding["offset_mapping"], strict=True)
    ]
    ids = encoding["input_ids"]
    if all(label == IGNORED for label in labels[1:max_length]):
        raise BadRow(
            f"no answer token within max_length={max_length}",
            f"raise prepare_data.max_length (this row has {len(ids)} tokens) or shorten its question",
        )
    return Encoded(ids[:max_length], labels[:max_length], len(ids) > max_length)


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that the chat template writes behind an answer; None where that is no token of its own."""
    asked, answer = [{"role": "user", "content": "a"}], "Zq7"
    try:
        whole = _render(tokenizer, [*asked, {"role": "assistant", "content": answer}], False)
    except BadRow:
        return None
    behind = tokenizer(whole.rpartition(answer)[2].lstrip(), add_special_tokens=False)["input_ids"]
    return int(behind[0]) if behind and behind[0] in tokenizer.added_tokens_decoder else None


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], opened: bool) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opened))
    except TemplateError as error:
        raise BadRow(
            f"the chat template refuses it ({error})", "change the roles or their order, or remove the row"
        ) from None


def _answer_spans(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], whole: str
) -> list[tuple[int, int]]:
    """Character spans of the assistant's turns in `whole`, from behind the opening to the end mark."""
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        opening = _render(tokenizer, messages[:index], True)
        turn = _render(tokenizer, messages[: index + 1], False)
        if not (whole.startswith(opening) and whole.startswith(turn)):
            raise BadRow(
                "the chat template renders a longer conversation differently from its beginning",
                "use rows with one answer, or another template",
            )
        # Templates end a turn with whitespace that is no part of the answer.
        end = len(turn) - len(turn[len(opening) :]) + len(turn[len(opening) :].rstrip())
        spans.append((len(opening), end))
    return spans
