"""The canonical row, and what makes one bad."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from json.encoder import encode_basestring
from typing import Any, Literal

ROLES = ("system", "user", "assistant", "tool")
# JSON can spell half of a character pair, which no encoding can write; a byte that is not UTF-8 is read as one too.
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
ESCAPED_BYTE = re.compile("[\udc80-\udcff]")

# To be raised whenever the same file becomes another picture: rows with pictures are then other rows.
PICTURES = b"pictures 1"
Kind = Literal["chat", "completion", "text"]


@dataclass(frozen=True)
class ImageRef:
    """A picture of a row, not yet read: a path or URL (relative ones to the source's folder), or the file's bytes."""

    place: str
    content: bytes | None = None


@dataclass(frozen=True)
class Picture:
    """A decoded image: the first half of the SHA-256 of the bytes it came as, its pixels, the tokens it becomes."""

    identity: bytes
    width: int
    height: int
    tokens: int


@dataclass(frozen=True)
class Row:
    """What is learnt from: turns of (role, text). `group` keeps rows that belong together on one side of the split.

    kind: a "completion" is one user turn and one assistant turn that no template is put around; a "text" is one
    assistant turn, all of which is learnt. `calls` are the tools that a turn calls, as (turn's number, JSON list);
    `tools` the JSON list of what could be called: text, since a table would give every tool all others' parameters.
    `unlearnt` are numbers of assistant turns that are only read; `mended` says what on_bad_row: repair changed.
    Once its `images` are decoded, a row has `pictures` instead, one for each mark in its texts.
    """

    messages: tuple[tuple[str, str], ...]
    group: str
    where: str
    kind: Kind = "chat"
    tools: str = ""
    calls: tuple[tuple[int, str], ...] = ()
    images: tuple[ImageRef, ...] = ()
    unlearnt: tuple[int, ...] = ()
    mended: tuple[str, ...] = field(default=(), compare=False)
    pictures: tuple[Picture, ...] = ()

    @cached_property
    def id(self) -> str:
        """Hash of the content alone: where the row stood does not matter."""
        digest = hashlib.sha256(written(self.messages).encode())
        if self.kind != "chat" or self.tools or self.calls or self.images or self.unlearnt:
            pictures = [
                (image.place, hashlib.sha256(image.content or b"").hexdigest()) for image in self.images
            ]
            more = [self.kind, self.tools, self.calls, pictures, self.unlearnt]
            digest.update(json.dumps(more, ensure_ascii=False).encode())
        for picture in self.pictures:
            digest.update(PICTURES + picture.identity)
        return digest.hexdigest()[:32]

    @property
    def chat(self) -> list[dict[str, Any]]:
        """The turns as `apply_chat_template` takes them: with the tools they call, results with the call they answer.

        The results after a turn stand in the order of its calls.
        """
        if not self.calls:
            return [{"role": role, "content": content} for role, content in self.messages]
        calls = dict(self.calls)
        turns: list[dict[str, Any]] = []
        open_calls: list[dict[str, Any]] = []
        for number, (role, content) in enumerate(self.messages):
            turn: dict[str, Any] = {"role": role, "content": content}
            if number in calls:
                turn["tool_calls"] = json.loads(calls[number])
            if role == "tool" and open_calls:
                answered = open_calls.pop(0)
                turn["name"] = answered.get("function", {}).get("name", "")
                if "id" in answered:
                    turn["tool_call_id"] = answered["id"]
            elif role != "tool":
                open_calls = list(turn.get("tool_calls", ()))
            turns.append(turn)
        return turns

    @property
    def prompt(self) -> list[dict[str, Any]]:
        """The turns before the last answer."""
        return self.chat[:-1]

    @property
    def prompt_json(self) -> str:
        """`prompt` as json.dumps writes it."""
        if self.calls:
            return json.dumps(self.prompt, ensure_ascii=False)
        turns = [
            f'{{"role": "{role}", "content": {encode_basestring(text)}}}' for role, text in self.messages[:-1]
        ]
        return f"[{', '.join(turns)}]"

    @property
    def answer(self) -> str:
        """The text of the last turn, or the calls that stand in its place."""
        return self.messages[-1][1] or dict(self.calls).get(len(self.messages) - 1, "")


def written(messages: Sequence[tuple[str, str]]) -> str:
    """What json.dumps writes, ids being made of it; several times as fast."""
    turns = [f'["{role}", {encode_basestring(text)}]' for role, text in messages]
    return f"[{', '.join(turns)}]"


class BadRow(Exception):
    """A row that cannot be learnt from.

    `reason` is counted, so it names the kind of fault; `found` is what this row has, `allowed` what it may have,
    `fix` the way out.
    """

    def __init__(self, reason: str, fix: str, found: str = "", allowed: str = "") -> None:
        # The name of a column may hold what no file can be written with.
        reason, fix, found, allowed = map(writable, (reason, fix, found, allowed))
        super().__init__(reason, fix, found, allowed)
        self.reason, self.fix, self.found, self.allowed = reason, fix, found, allowed

    def __str__(self) -> str:
        said = f"{self.reason}: {self.found}" if self.found else self.reason
        return f"{said} (allowed: {self.allowed})" if self.allowed else said

    def line(self, where: str) -> dict[str, str]:
        """The row's entry in rejected.jsonl; `where` is "file: row 3"."""
        entry = {"where": where, "reason": self.reason, "found": self.found, "allowed": self.allowed}
        return {key: value for key, value in {**entry, "fix": self.fix}.items() if value}


def writable(text: str) -> str:
    """`text` with lone surrogates spelt out."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def quoted(value: object, length: int = 60) -> str:
    """`value` as an error shows it: short, on one line, and writable in any encoding."""
    shown = ascii(value) if isinstance(value, str) and LONE_SURROGATE.search(value) else repr(value)
    return shown if len(shown) <= length else f"{shown[: length - 1]}…"


def check(
    messages: Sequence[tuple[str, Any]], kind: Kind = "chat", calling: Collection[int] = ()
) -> tuple[tuple[str, str], ...]:
    """Checks a row's turns: known roles, text everywhere; in a chat a question first and an answer last.

    Args:
        calling: the numbers of the turns that call tools; they need no text.

    Raises:
        BadRow: with reason and fix.
    """
    for number, (role, content) in enumerate(messages):
        if role not in ROLES:
            raise BadRow("unknown role", f"use one of {', '.join(ROLES)}", quoted(role), ", ".join(ROLES))
        _check_content(
            _part_name(role, kind), content, number in calling, number + 1 if kind == "chat" else 0
        )
    if kind == "chat":
        _check_order([role for role, _ in messages])
    return tuple(messages)


def _part_name(role: str, kind: Kind) -> str:
    if kind == "text":
        return "text"
    return f"{role} turn" if kind == "chat" else ("prompt" if role == "user" else "completion")


def _check_content(part: str, content: object, may_be_empty: bool, number: int) -> None:
    at = f"turn {number}" if number else ""
    if not isinstance(content, str):
        raise BadRow(
            f"the {part} is {type(content).__name__}, not text",
            "write it as text",
            f"{at} {quoted(content)}".strip(),
        )
    if not may_be_empty and not content.strip():
        answer = part in ("assistant turn", "completion")
        raise BadRow("no answer" if answer else f"an empty {part}", "fill it in or remove the row", at)
    if not content.isascii():
        check_writable(f"the {part}", content, at)


def check_writable(part: str, content: str, at: str = "") -> None:
    """Refuses text that no encoding can write.

    Raises:
        BadRow: half a character, or a byte that is not UTF-8.
    """
    half = LONE_SURROGATE.search(content)
    if not half:
        return
    around = quoted(content[max(0, half.start() - 10) : half.start() + 10])
    if ESCAPED_BYTE.search(content):
        raise BadRow(
            f"{part} holds bytes that are not UTF-8", "save the file as UTF-8", f"{at} {around}".strip()
        )
    raise BadRow(
        f"{part} holds half a character (a lone surrogate)", "write it whole", f"{at} {around}".strip()
    )


def _check_order(roles: list[str]) -> None:
    turns = [role for role in roles if role != "system"]
    said = ", ".join(roles[:8]) + (", …" if len(roles) > 8 else "")
    if not turns or turns[0] != "user":
        raise BadRow(
            "no question at its start", "begin with a user turn (after an optional system turn)", said
        )
    if turns[-1] != "assistant":
        raise BadRow("no answer", "end with an assistant turn", said)
    for one, two in itertools.pairwise(turns):
        if one == two and one != "tool":  # several tools may answer one call
            raise BadRow(f"two {one} turns in a row", "join them or put the other's turn between", said)
        if (one, two) in (("user", "tool"), ("tool", "user")):
            raise BadRow(f"a {two} turn right after a {one} turn", "put the assistant's turn between", said)
    if "system" in roles[1:]:
        raise BadRow("a system turn that is not the first", "move it to the start", said)
