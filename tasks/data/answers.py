"""Where in a rendered conversation the answers lie.

An answer reaches from behind what the template opens it with to the end of its end mark. Both are found by rendering
the conversation's beginnings, each of which must be a beginning of the whole, or by the template's own
`{% generation %}` marks. What lies between the turns depends on the order of roles alone in nearly every template, so
it is found once for each order, with stand-ins for what is said (a `Frame`); a row is then rendered once, and taken by
the frame only if it is what the frame foretells, letter for letter.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tasks.data.image_turns import text_of
from tasks.data.rendering import Messages, Span, Template, stand_ins
from tasks.data.rows import BadRow, Row

Tools = list[Any] | None
KNOWS_TOOLS = "give a prepare_data.template that writes tools, or remove the row"


class Rendered(NamedTuple):
    """A conversation's text. `spans`: its answers with their end marks, in characters; those of the last answer
    begin at `spans[last]`. `complete`: whether all answers are among them.
    """

    text: str
    spans: tuple[Span, ...]
    last: int
    complete: bool


@dataclass(frozen=True)
class Frame:
    """What a template writes around the turns of one order of roles; `sample` is it around stand-ins.

    `glue`: the text before each turn and behind the last, None where a turn does not stand in the text as it was said.
    `places`: (turn, characters before its content, characters behind it) of each span.
    """

    sample: Rendered
    glue: tuple[str, ...] | None
    places: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, sample: Rendered, contents: Sequence[str]) -> Frame:
        text = sample.text
        starts = [text.find(content) for content in contents]
        plain = starts == sorted(starts) and all(text.count(content) == 1 for content in contents)
        places = []
        for begin, end in sample.spans:
            within = [turn for turn, start in enumerate(starts) if begin <= start < end]
            plain = plain and len(within) == 1
            if plain:
                turn = within[0]
                places.append((turn, starts[turn] - begin, end - starts[turn] - len(contents[turn])))
        if not plain:
            return cls(sample, None, ())
        ends = [0, *(start + len(content) for start, content in zip(starts, contents, strict=True))]
        glue = tuple(text[end:start] for end, start in zip(ends, [*starts, len(text)], strict=True))
        return cls(sample, glue, tuple(places))

    def fit(self, contents: Sequence[str], text: str) -> Rendered | None:
        """The spans in `text`, or None if it is not these contents within this frame (trimmed, if need be)."""
        if self.glue is None:
            return None
        at, borders = 0, []
        for glue, content in zip(self.glue, contents, strict=False):
            if not text.startswith(glue, at):
                return None
            at += len(glue)
            said = content if text.startswith(content, at) else content.strip()
            if not text.startswith(said, at):
                return None
            borders.append((at, at + len(said)))
            at += len(said)
        if text[at:] != self.glue[-1]:
            return None
        spans = [
            (borders[turn][0] - before, borders[turn][1] + behind) for turn, before, behind in self.places
        ]
        return Rendered(text, tuple(spans), self.sample.last, self.sample.complete)


class Answers:
    """Finds the answers of rows under one template."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._frames: dict[tuple[str, ...], Frame | BadRow] = {}

    def of(self, rows: Sequence[Row]) -> list[Rendered | BadRow]:
        """Each row's text and spans, or why it has none."""
        plain = [row for row in rows if not row.tools and not row.calls]
        try:
            texts = self._template.render_all([self._template.turns(row) for row in plain])
            ready = {id(row): text for row, text in zip(plain, texts, strict=True)}
        except BadRow:
            ready = {}  # one of them; each is asked for by itself
        found: list[Rendered | BadRow] = []
        for row in rows:
            try:
                found.append(self._rendered(row, ready.get(id(row))))
            except BadRow as error:
                found.append(error)
        return found

    def unstable(self, row: Row) -> bool:
        """Whether an earlier answer of the row is written otherwise once more is said."""
        roles = tuple(role for role, _ in row.messages)
        if roles.count("assistant") < 2:
            return False
        thinks = any("</think>" in content for role, content in row.messages[:-1] if role == "assistant")
        try:
            if row.tools or row.calls or thinks:
                return not self._rendered(row, None).complete
            return not self._frame(roles).sample.complete
        except BadRow:
            return False

    def _rendered(self, row: Row, text: str | None) -> Rendered:
        for role, content in row.messages:
            written = self._template.writes.search(content)
            if written:
                raise BadRow(
                    f"the {role} turn holds {written[0]}, which the chat template writes itself",
                    "take it out of the text, where it would begin or end a turn",
                )
        messages, tools = self._template.turns(row), json.loads(row.tools) if row.tools else None
        if text is None:
            text = self._template.render(messages, tools)
        if row.tools or row.calls:
            rendered = self._spans(messages, tools, text)
            _refuse_unsaid(messages, tools or [], rendered)
            return rendered
        frame = self._frame(tuple(role for role, _ in row.messages))
        contents = [message["content"] for message in messages]
        # Images that are parts of a turn stand where the template puts them.
        fitted = frame.fit(contents, text) if all(isinstance(content, str) for content in contents) else None
        return fitted or self._spans(messages, None, text)

    # --- frames ---------------------------------------------------------------------------------

    def _frame(self, roles: tuple[str, ...]) -> Frame:
        """Raises BadRow: the template refuses this order of roles or leaves a turn out."""
        found = self._frames.get(roles)
        if found is None:
            try:
                found = self._make_frame(roles)
            except BadRow as error:
                found = error
            self._frames[roles] = found
        if isinstance(found, BadRow):
            raise BadRow(found.reason, found.fix)
        return found

    def _make_frame(self, roles: tuple[str, ...]) -> Frame:
        messages = stand_ins(roles)
        text = self._template.render(messages)
        contents = [str(message["content"]) for message in messages]
        for role, content in zip(roles, contents, strict=True):
            if content not in text:
                raise _left_out(role)
        return Frame.of(self._continued(roles, messages, text) or self._spans(messages, None, text), contents)

    def _continued(self, roles: tuple[str, ...], messages: Messages, text: str) -> Rendered | None:
        """The spans by those of the conversation without its last answer, so that long ones take few renderings."""
        earlier = len(roles) - 2
        while earlier > 0 and roles[earlier] != "assistant":
            earlier -= 1
        if earlier <= 0 or self._template.marks_answers:
            return None
        try:
            for turn in range(earlier + 1):  # the shortest first, so that none of them goes deep
                if roles[turn] == "assistant":
                    shorter = self._frame(roles[: turn + 1]).sample
        except BadRow:
            return None
        if not shorter.complete or not text.startswith(self._kept(shorter.text)):
            return None
        last = self._span(messages, None, text, len(messages) - 1)
        if last is None:
            return None
        earlier_end = self._closed(text, shorter.spans[-1][1])
        spans = (*shorter.spans[:-1], (shorter.spans[-1][0], earlier_end), last)
        return Rendered(text, spans, len(spans) - 1, True)

    # --- spans ----------------------------------------------------------------------------------

    def _spans(self, messages: Messages, tools: Tools, text: str) -> Rendered:
        if self._template.marks_answers:
            marked = self._marked(messages, tools, text)
            if marked is not None:
                return marked
        answers = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        found = [self._span(messages, tools, text, turn) for turn in answers]
        spans = tuple(span for span in found if span is not None)
        return Rendered(text, spans, len(spans) - 1, len(spans) == len(found))

    def _span(self, messages: Messages, tools: Tools, text: str, turn: int) -> Span | None:
        """From behind the opening to the end mark; None if the text does not begin as the shorter conversation.

        Raises:
            BadRow: the last answer is opened otherwise than it is written.
        """
        last = turn == len(messages) - 1
        opening = self._template.render(messages[:turn], tools, True)
        begin = _shared(opening, text)
        if opening[begin:].strip():
            if last:
                raise BadRow(
                    f"the chat template opens an answer with {opening[begin:][:40]!r}, which is not in a finished one",
                    "give a prepare_data.template whose answers begin as they are opened",
                )
            return None
        written = text if last else self._template.render(messages[: turn + 1], tools)
        kept = self._kept(written)
        if text.startswith(kept):
            return begin, self._closed(text, max(len(kept), begin))
        # Some templates put one more end token behind the whole.
        end = len(kept) - len(self._template.end_mark) + self._template.first_stop
        return (begin, end) if self._template.first_stop and text.startswith(kept[:end]) else None

    def _kept(self, text: str) -> str:
        """Without the blanks that templates write behind an end mark and that are no part of the answer."""
        return text.rstrip() if self._template.end_mark else text

    def _closed(self, text: str, end: int) -> int:
        """`end`, or behind the special token that opens the next turn where nothing else ends an answer."""
        return end if self._template.end_mark else end + len(self._template.special_at(text, end))

    def _marked(self, messages: Messages, tools: Tools, text: str) -> Rendered | None:
        """By the template's own marks, each of them drawn out to the end mark."""
        again, spans = self._template.render_marked(messages, tools)
        if again != text or not spans:
            return None
        mark = self._template.end_mark
        closed = []
        for begin, end in spans:
            open_end = mark and not text[begin:end].rstrip().endswith(mark.strip())
            closed.append((begin, end + len(mark) if open_end and text.startswith(mark, end) else end))
        before = self._kept(self._template.render(messages[:-1], tools))
        if not text.startswith(before):
            before = ""  # then the last of the marks is the last answer's
        last = next(
            (place for place, (begin, _) in enumerate(closed) if 0 < len(before) <= begin), len(closed) - 1
        )
        return Rendered(text, tuple(closed), last, True)


def _refuse_unsaid(messages: Messages, tools: list[Any], rendered: Rendered) -> None:
    """Raises BadRow if the text leaves out a tool, a call or a turn."""
    text = rendered.text
    if any(_name(tool) not in text for tool in tools):
        raise BadRow("the chat template leaves the tools out", KNOWS_TOOLS)
    answers = [message for message in messages if message["role"] == "assistant"]
    spans = rendered.spans if len(rendered.spans) == len(answers) else [(0, len(text))] * len(answers)
    for message, (begin, end) in zip(answers, spans, strict=True):
        if any(_name(call) not in text[begin:end] for call in message.get("tool_calls", ())):
            raise BadRow("the chat template leaves a tool's call out", KNOWS_TOOLS)
    for message in messages:
        said = text_of(message["content"]).rpartition("</think>")[2].strip()
        if said and not (said in text or json.dumps(said, ensure_ascii=False)[1:-1] in text):
            raise _left_out(message["role"])


def _shared(one: str, other: str) -> int:
    """How many characters both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def _name(tool: Any) -> str:
    """The name of a tool or of its call, however it is wrapped."""
    inner = tool.get("function", tool) if isinstance(tool, dict) else {}
    return str(inner.get("name", "")) if isinstance(inner, dict) else ""


def _left_out(role: str) -> BadRow:
    return BadRow(
        f"the chat template leaves the {role} turn out",
        "give a prepare_data.template that writes it, or move its text into the question",
    )
