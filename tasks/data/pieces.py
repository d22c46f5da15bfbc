"""Rows that are learnt in parts: long texts, and conversations whose earlier answers are forgotten in part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from tasks.data.pictures import count_marks
from tasks.data.rows import Row
from tasks.data.tokens import Tokeniser, Tokens


@dataclass(frozen=True)
class Piece(Row):
    """A part of a row that is learnt by itself. `number` counts a row's parts, of which `last` is the last."""

    number: int = 0
    last: bool = True

    @property
    def id(self) -> str:
        """A text may say the same twice: its parts are different rows all the same."""
        return f"{super().id[:26]}{self.number:06x}"


def answer_pieces(row: Row) -> Iterator[Piece]:
    """The conversation up to each of its answers that is to be learnt."""
    answers = [turn for turn, (role, _) in enumerate(row.messages) if role == "assistant"]
    turns = [turn for turn in answers if turn not in row.unlearnt]
    for number, turn in enumerate(turns):
        calls = tuple((at, text) for at, text in row.calls if at <= turn)
        messages = row.messages[: turn + 1]
        shown = row.pictures[: count_marks(content for _, content in messages)]
        last = turn == turns[-1]
        yield _piece(row, number, last, messages=messages, calls=calls, pictures=shown)


def text_pieces(row: Row, tokeniser: Tokeniser, room: int, ends: int) -> Iterator[Row]:
    """The text in pieces of `room` tokens at most, with `ends` more behind the last; joined, they are the text."""
    role, text = row.messages[-1]
    tokens = tokeniser.encode([text])[0]
    if len(tokens.ids) + ends <= room:
        yield row
        return
    at = number = 0
    while at < len(text):
        end = _end(text, at, tokeniser, tokens, room, ends)
        yield _piece(row, number, end == len(text), messages=((role, text[at:end]),))
        at, number = end, number + 1


def _end(text: str, at: int, tokeniser: Tokeniser, tokens: Tokens, room: int, ends: int) -> int:
    """Where the piece that begins at `at` ends: encoded by itself it has `room` tokens at most, its last word whole."""
    first, wanted = tokens.ending_by(at), room
    while True:
        end, more = len(text), ends
        if len(tokens.ids) - first + ends > wanted:
            end, more = max(tokens.chars(first + wanted), at + 1), 0
            blank = max(text.rfind(" ", at + 1, end), text.rfind("\n", at + 1, end))
            end = blank if 2 * blank > at + end else end
        over = len(tokeniser.encode([text[at:end]])[0].ids) + more - room
        if over <= 0 or end == at + 1:
            return end
        wanted = max(wanted - over, 1)


def _piece(row: Row, number: int, last: bool, **changes: Any) -> Piece:
    same = {field.name: getattr(row, field.name) for field in fields(Row)}
    return Piece(**(same | changes), number=number, last=last)
