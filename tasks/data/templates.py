"""Rows -> token ids and labels: conversations by a chat template, completions and texts without one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tasks.data.answers import Answers, Rendered
from tasks.data.finishing import Draft, Encoded, Finisher
from tasks.data.image_turns import refuse_unlike
from tasks.data.pictures import MARK
from tasks.data.pieces import Piece, answer_pieces, text_pieces
from tasks.data.rendering import Template, begin_ids, finished
from tasks.data.rows import BadRow, Row
from tasks.data.tokens import Tokeniser
from tasks.data.vision import Vision
from tasks.errors import UserError
from tasks.params import Params
from tasks.paths import Paths

__all__ = ["Encoded", "Encoder", "encode", "load_tokenizer"]

OTHERWISE = "the chat template renders a longer conversation differently from its beginning"
TWO_ROUNDS = Row((("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4")), "", "")
Learn = Literal["answers", "last", "all"]


def load_tokenizer(folder: Path, name: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer of the model called `name`, whose files lie in `folder`.

    Args:
        trust_remote_code: run a tokenizer's own code, which lies in `folder` too.

    Raises:
        UserError: there is none, or it needs its own code.
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
    return tokenizer


class Encoder:
    """Makes a row's ids and labels.

    - A conversation's ids are those of `apply_chat_template`: the template writes the begin token, and one that does
      not is given it where the tokenizer has one. Learnt are the answers with their end marks ("answers"), the last
      one ("last"), or every token ("all"). Where a template writes no end mark, the end token is put behind the last
      answer, and the special token that opens the next turn ends the others.
    - A completion is begin token, question, answer and end token without a template; the answer begins with a token
      of its own. A text is begin token, text, end token, all of it learnt.
    - What is longer than `max_length` tokens is cut at the end: before a character that would be halved, and behind
      the last token that is learnt. A picture's tokens are all there, or none of them; they are never learnt.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None,
        max_length: int,
        learn: Learn,
        vision: Vision | None = None,
    ) -> None:
        """
        Args:
            template: in Jinja; None is the tokenizer's own.
            vision: of a base that sees pictures.

        Raises:
            UserError: the template cannot write a question with its answer.
        """
        self._tokenizer, self._max_length, self._learn = tokenizer, max_length, learn
        self.vision = vision
        text = template or (tokenizer.get_chat_template() if tokenizer.chat_template else None)
        self._template = Template(tokenizer, finished(tokenizer, text), vision) if text else None
        self._answers = Answers(self._template) if self._template else None
        self._tokeniser = Tokeniser(tokenizer)
        self._finisher = Finisher(self._tokeniser, max_length, vision)
        self._begin = tuple(begin_ids(tokenizer))
        self._end = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)

    @classmethod
    def of(cls, params: Params, paths: Paths) -> Encoder:
        """That of `data/base/`, whose tokenizer holds the template that `ensure_template` chose.

        Raises:
            UserError: no tokenizer there, or a template that cannot serve.
        """
        model, wanted = params.model, params.prepare_data
        tokenizer = load_tokenizer(paths.base, model.name_or_path, model.trust_remote_code)
        vision = Vision.of(paths.base, tokenizer, model.name_or_path)
        return cls(tokenizer, None, wanted.max_length, wanted.learn, vision)

    @property
    def notes(self) -> list[str]:
        """What a user should know of the template, in sentences."""
        if self._template is None or self._answers is None:
            return []
        notes = []
        if not self._template.end_mark:
            end = self._tokenizer.eos_token
            notes.append(
                f"it writes nothing behind an answer; {end} is put behind the last one"
                if end
                else "it writes nothing behind an answer and the tokenizer has no end token: nothing tells it to stop"
            )
        if self._learn == "answers" and self._answers.unstable(TWO_ROUNDS):
            notes.append(
                "it writes earlier answers otherwise than the last: each answer becomes a row of its own"
            )
        return notes

    def encode(self, rows: Sequence[Row]) -> list[Encoded | BadRow]:
        """Ids and labels of each row, or why it cannot be learnt; in the order of the rows.

        Raises:
            UserError: a conversation, and there is no template.
        """
        unsure = rows if self.vision else [row for row in rows if row.images]
        refused = {id(row): error for row in unsure if (error := _refusal(row, self.vision))}
        chats = [row for row in rows if row.kind == "chat" and id(row) not in refused]
        rendered = {id(row): found for row, found in zip(chats, self._render(chats), strict=True)}
        drafts = [refused.get(id(row)) or self._draft(row, rendered.get(id(row))) for row in rows]
        texts = [draft.text for draft in drafts if not isinstance(draft, BadRow)]
        tokens = iter(self._tokeniser.encode(texts))
        return [
            draft if isinstance(draft, BadRow) else self._finisher.of(draft, next(tokens)) for draft in drafts
        ]

    def prompt(self, row: Row) -> list[dict[str, Any]]:
        """The turns before the last answer, as the template takes them."""
        if row.kind == "chat":
            return self._template.turns(row)[:-1] if self._template else row.prompt
        return [turn | {"content": self._marked(turn["content"], row)} for turn in row.prompt]

    def pieces(self, row: Row) -> Iterator[Row]:
        """The rows to encode in the place of `row`: most often itself.

        A text longer than `max_length` becomes several, each with a begin token and the last with an end token; one
        with pictures is cut at the end. A
        conversation with earlier answers that the template would write otherwise once more is said (models that think
        forget earlier thoughts) becomes one row an answer, each as it is when that answer is to be given.
        """
        if row.kind == "text" and not row.pictures:
            room = self._max_length - len(self._begin)
            yield from text_pieces(row, self._tokeniser, room, len(self._end))
        elif (
            self._learn == "answers" and row.kind == "chat" and self._answers and self._answers.unstable(row)
        ):
            yield from answer_pieces(row)
        else:
            yield row

    # --- drafts ---------------------------------------------------------------------------------

    def _render(self, chats: Sequence[Row]) -> list[Rendered | BadRow]:
        if not chats:
            return []
        if self._answers is None:
            raise UserError(
                "the tokenizer has no chat template and its family is not known, so it is unknown where an answer "
                "begins; set prepare_data.template to a family's name or a .jinja file, or use rows of format "
                "completion or text"
            )
        return self._answers.of(chats)

    def _draft(self, row: Row, rendered: Rendered | BadRow | None) -> Draft | BadRow:
        if isinstance(rendered, BadRow):
            return rendered
        if rendered is not None:
            draft = self._chat(row, rendered)
            return draft._replace(pictures=row.pictures) if isinstance(draft, Draft) else draft
        everything = row.kind == "text" or self._learn == "all"
        contents = [self._marked(content, row) for _, content in row.messages]
        text = "".join(contents)
        begin = len(text) - len(contents[-1])
        after = () if isinstance(row, Piece) and not row.last else self._end
        return Draft(text, ((begin, len(text)),), self._begin, after, everything, begin, row.pictures)

    def _marked(self, content: str, row: Row) -> str:
        return content.replace(MARK, self.vision.mark) if row.pictures and self.vision else content

    def _chat(self, row: Row, rendered: Rendered) -> Draft | BadRow:
        assert self._template is not None
        if row.unlearnt and not isinstance(row, Piece):
            return self._partly(row, rendered)
        spans = rendered.spans
        if self._learn == "last" or isinstance(row, Piece):
            spans = spans[rendered.last :]
        elif self._learn == "answers" and not rendered.complete:
            return BadRow(
                OTHERWISE, "use rows with one answer, prepare_data.learn: last, or another template"
            )
        after = () if self._template.end_mark else self._end
        return Draft(rendered.text, spans, (), after, self._learn == "all")

    def _partly(self, row: Row, rendered: Rendered) -> Draft | BadRow:
        """A conversation some of whose answers are only read."""
        answers = [turn for turn, (role, _) in enumerate(row.messages) if role == "assistant"]
        if self._learn == "all":
            return BadRow(
                "it says which of its turns are not to be learnt, and prepare_data.learn=all learns every turn",
                "use prepare_data.learn: answers, or take the marks out",
            )
        if len(rendered.spans) != len(answers):
            return BadRow(
                "it says which of its answers are not to be learnt, and the template does not tell them apart",
                "take the marks out, or use rows with one answer",
            )
        learnt = [
            span for turn, span in zip(answers, rendered.spans, strict=True) if turn not in row.unlearnt
        ]
        if self._learn == "last":
            learnt = learnt[-1:] if answers[-1] not in row.unlearnt else []
        if not learnt:
            return BadRow(
                "its last answer is not to be learnt", "use prepare_data.learn: answers, or remove the row"
            )
        ends = not self._template or not self._template.end_mark
        after = self._end if ends and answers[-1] not in row.unlearnt else ()
        return Draft(rendered.text, tuple(learnt), (), after)


def _refusal(row: Row, vision: Vision | None) -> BadRow | None:
    try:
        refuse_unlike(row, vision)
    except BadRow as error:
        return error
    return None


def encode(tokenizer: PreTrainedTokenizerBase, row: Row, max_length: int) -> Encoded:
    """One row's ids and labels as lists, by the tokenizer's own template, its answers learnt.

    Raises:
        BadRow: it cannot be learnt.
    """
    found = Encoder(tokenizer, None, max_length, "answers").encode([row])[0]
    if isinstance(found, BadRow):
        raise found
    return Encoded(np.asarray(found.input_ids).tolist(), np.asarray(found.labels).tolist(), found.truncated)
