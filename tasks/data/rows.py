"""The canonical row, and what makes one bad."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from dataclasses import dataclass
from typing import Any, Literal

ROLES = ("system", "user", "assistant", "tool")
# JSON can spell half of a character pair, which no encoding can write.
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


Kind = Literal["chat", "completion", "text"]


@dataclass(frozen=True)
class ImageRef:
    """A picture of a row, not yet read: a path or URL (relative ones to the source's folder), or the file's bytes."""

    place: str
    content: bytes | None = None


@dataclass(frozen=True)
class Row:
    """What is learnt from: turns of (role, text). `group` keeps rows that belong together on one side of the split.

    kind: a "completion" is one user turn and one assistant turn that no template is put around; a "text" is one
    assistant turn, all of which is learnt. `calls` are the tools that a turn calls, as (turn's number, JSON list);
    `tools` the JSON list of what could be called: text, since a table would give every tool all others' parameters.
    """

    messages: tuple[tuple[str, str], ...]
    group: str
    where: str
    kind: Kind = "chat"
    tools: str = ""
    calls: tuple[tuple[int, str], ...] = ()
    images: tuple[ImageRef, ...] = ()

    @property
    def id(self) -> str:
        """Hash of the content alone: where the row stood does not matter."""
        digest = hashlib.sha256(json.dumps(self.messages, ensure_ascii=False).encode())
        if self.kind != "chat" or self.tools or self.calls or self.images:
            pictures = [
                (image.place, hashlib.sha256(image.content or b"").hexdigest()) for image in self.images
            ]
            more = [self.kind, self.tools, self.calls, pictures]
            digest.update(json.dumps(more, ensure_ascii=False).encode())
        return digest.hexdigest()[:32]

    @property
    def chat(self) -> list[dict[str, Any]]:
        """The turns as `apply_chat_template` takes them, called tools included."""
        calls = dict(self.calls)
        turns: list[dict[str, Any]] = []
        for number, (role, content) in enumerate(self.messages):
            turn: dict[str, Any] = {"role": role, "content": content}
            if number in calls:
                turn["tool_calls"] = json.loads(calls[number])
            turns.append(turn)
        return turns

    @property
    def prompt(self) -> list[dict[str, Any]]:
        """The turns before the last answer."""
        return self.chat[:-1]

    @property
    def answer(self) -> str:
        return self.messages[-1][1]


class BadRow(Exception):
    """A row that cannot be learnt from: `reason` is counted, `fix` says the way out."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.reason, self.fix = reason, fix


def check(messages: list[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Checks a conversation: known roles, text everywhere, a question first, an answer last.

    Raises:
        BadRow: with reason and fix.
    """
    for role, content in messages:
        if role not in ROLES:
            raise BadRow(f"unknown role {role!r}", f"use one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise BadRow(f"the {role} turn is {type(content).__name__}, not text", "write it as text")
        if not content.strip():
            what = "no answer" if role == "assistant" else f"an empty {role} turn"
            raise BadRow(what, "fill it in or remove the row")
        if LONE_SURROGATE.search(content):
            raise BadRow(f"the {role} turn holds half a character (a lone surrogate)", "write it whole")
    _check_order([role for role, _ in messages])
    return tuple(messages)


def _check_order(roles: list[str]) -> None:
    turns = [role for role in roles if role != "system"]
    if not turns or turns[0] != "user":
        raise BadRow("no question at its start", "begin with a user turn (after an optional system turn)")
    if turns[-1] != "assistant":
        raise BadRow("no answer", "end with an assistant turn")
    for one, two in itertools.pairwise(turns):
        if one == two and one != "tool":  # several tools may answer one call
            raise BadRow(f"two {one} turns in a row", "join them or put the other's turn between")
        if (one, two) in (("user", "tool"), ("tool", "user")):
            raise BadRow(f"a {two} turn right after a {one} turn", "put the assistant's turn between")
    if "system" in roles[1:]:
        raise BadRow("a system turn that is not the first", "move it to the start")
