"""A chat template: conversation -> text, and what can be seen of the template by what it writes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from tasks.data.image_turns import turns
from tasks.data.rows import BadRow, Row
from tasks.data.vision import Vision
from tasks.errors import UserError

Messages = list[dict[str, Any]]
Span = tuple[int, int]
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# What a template's own code may raise over a row: it is the row that it cannot render.
FAILURES = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
CLOCK = "strftime_now"
# Some templates write today's date. Rows prepared twice must be the same rows, so it stands still, on the day that
# Llama 3's own template takes where it sees no clock; for formats of days and of times alike.
STILL = {
    "%d": "26",
    "%-d": "26",
    "%m": "07",
    "%b": "Jul",
    "%B": "July",
    "%Y": "2024",
    "%y": "24",
    "%A": "Friday",
}
STILL |= {"%a": "Fri", "%H": "00", "%M": "00", "%S": "00", "%F": "2024-07-26", "%T": "00:00:00"}
# Templates of models that see pictures take a turn in parts; what is text alone is made one part.
IN_PARTS = (
    "{%- set parts = namespace(turns=[]) -%}{%- for message in messages -%}"
    "{%- set turn = {'role': message['role'], 'content': [{'type': 'text', 'text': message['content']}]} -%}"
    "{%- set parts.turns = parts.turns + [turn if message['content'] is string else message] -%}"
    "{%- endfor -%}{%- set messages = parts.turns -%}"
)


class Template:
    """A chat template with a tokenizer's special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str, vision: Vision | None = None) -> None:
        self.text, self.vision = text, vision
        self._values = dict(tokenizer.special_tokens_map)
        added = list(tokenizer.added_tokens_decoder.values())
        special = {
            *map(str, tokenizer.all_special_tokens),
            *(token.content for token in added if token.special),
        }
        self._special = sorted(special, key=len, reverse=True)
        self._added = sorted((token.content for token in added), key=len, reverse=True)
        self._ends = {token for token in (tokenizer.bos_token, tokenizer.eos_token) if token}

    def render(self, messages: Messages, tools: list[Any] | None = None, opened: bool = False) -> str:
        """The text, and if `opened`, what an answer begins with.

        Raises:
            BadRow: the template refuses it.
        """
        return self._run([messages], tools, add_generation_prompt=opened)[0][0]

    def render_all(self, conversations: list[Messages]) -> list[str]:
        """As `render`, of several turns of text without tools, refused together."""
        # What render_jinja_template does, without copying the globals and looking into the turns for each of them.
        compiled: Any = _compile_jinja_template(self.text)
        shared = {**compiled.globals, "tools": None, "documents": None, "add_generation_prompt": False}
        shared |= self._values
        with _refusals():
            return [
                "".join(compiled.root_render_func(compiled.new_context({**shared, "messages": chat}, True)))
                for chat in conversations
            ]

    def render_marked(self, messages: Messages, tools: list[Any] | None = None) -> tuple[str, list[Span]]:
        """The text, and what in it stands within `{% generation %}` marks, in characters."""
        texts, marks = self._run([messages], tools, return_assistant_tokens_mask=True)
        return texts[0], [(begin, end) for begin, end in marks[0] if begin < end]

    def _run(
        self, conversations: list[Messages], tools: list[Any] | None, **more: bool
    ) -> tuple[list[str], list[list[Span]]]:
        render: Any = render_jinja_template  # which says that it returns one text
        with _refusals():
            texts, marks = render(
                conversations=conversations, tools=tools, chat_template=self.text, **more, **self._values
            )
        return texts, marks

    def turns(self, row: Row) -> Messages:
        """The row's turns as the template takes them, with its pictures' marks."""
        return turns(row, self.vision, self.takes_parts) if row.pictures else row.chat

    @cached_property
    def takes_parts(self) -> bool:
        """Whether it writes the image token for a part that is an image; else images are written into the text."""
        if self.vision is None:
            return False
        asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "zq0qz"}]}
        try:
            text = self.render([asked, *stand_ins(("user", "assistant"))[1:]])
        except BadRow:
            return False
        return text.count(self.vision.token) == 1 == text.count("zq0qz")

    @cached_property
    def sample(self) -> str:
        """One round as the template writes it.

        Raises:
            UserError: it can write none.
        """
        refusal = "the template leaves one of them out"
        for roles in (("user", "assistant"), ("system", "user", "assistant")):
            try:
                text = self.render(stand_ins(roles))
            except BadRow as error:
                refusal = error.reason
            else:
                if all(f"zq{turn}qz" in text for turn in range(len(roles))):
                    return text
        raise UserError(
            f"no question with its answer can be written: {refusal}; give another prepare_data.template"
        )

    @cached_property
    def end_mark(self) -> str:
        """What stands behind an answer; "" in prompts like GLM-4's, where only the next turn's opening does."""
        return self.sample[self.sample.rfind("qz") + 2 :].rstrip()

    @cached_property
    def stop(self) -> str:
        """The special token that ends an answer: the first in its end mark (else one that was added to the vocabulary
        and begins the mark), and without a mark what opens the next turn.
        """
        if mark := self.end_mark.lstrip():
            return self._special_in(mark) or next(filter(mark.startswith, self._added), "")
        text = self.render(stand_ins(("user", "assistant", "user")))
        return self.special_at(text, text.find("zq1qz") + len("zq1qz"))

    @cached_property
    def first_stop(self) -> int:
        """How many characters of the end mark there are up to the end of the first special token; 0 without one."""
        found = self._special_in(self.end_mark)
        return self.end_mark.find(found) + len(found) if found else 0

    @cached_property
    def marks_answers(self) -> bool:
        """Whether its `{% generation %}` marks are where answers are; those in a macro are reported elsewhere."""
        if not GENERATION.search(self.text):
            return False
        try:
            text, marks = self.render_marked(stand_ins(("user", "assistant")))
        except BadRow:
            return True
        return any("zq1qz" in text[begin:end] for begin, end in marks)

    @cached_property
    def writes(self) -> re.Pattern[str]:
        """The special tokens that the template itself writes: in a turn's text they would begin or end a turn."""
        written = {token for token in self._special if token in self.sample} | self._ends
        return re.compile("|".join(map(re.escape, sorted(written, key=len, reverse=True))) or "(?!)")

    def _special_in(self, text: str) -> str:
        return next(filter(None, (self.special_at(text, place) for place in range(len(text)))), "")

    def special_at(self, text: str, place: int) -> str:
        """The special token that begins there, or ""."""
        return next((token for token in self._special if text.startswith(token, place)), "")


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except FAILURES as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise BadRow(
            f"the chat template refuses it ({reason})",
            "change the roles or their order, or remove the row",
        ) from None


def stand_ins(roles: Sequence[str]) -> Messages:
    """A conversation of `roles` whose turns say zq0qz, zq1qz, … : no template has such words of its own."""
    return [{"role": role, "content": f"zq{turn}qz"} for turn, role in enumerate(roles)]


def finished(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The template with the begin tokens that the tokenizer puts before a text, if it writes none; with a clock that
    stands still, if it asks for the time; and for turns of text, if it takes turns of parts alone. Finishing it again
    changes nothing.

    Raises:
        UserError: it cannot write a question with its answer.
    """
    if CLOCK in text and _still_clock() not in text:
        text = _still_clock() + text
    try:
        _ = Template(tokenizer, text).sample
    except UserError:
        if IN_PARTS in text:
            raise
        try:
            _ = Template(tokenizer, IN_PARTS + text).sample
        except UserError:
            pass  # then the first reason is the one to tell
        else:
            return finished(tokenizer, IN_PARTS + text)
        raise
    begin = begin_ids(tokenizer)
    if not begin:
        return text
    sample: list[int] = tokenizer(Template(tokenizer, text).sample, add_special_tokens=False)["input_ids"]
    if sample[: len(begin)] == begin:
        return text
    if begin == [tokenizer.bos_token_id]:
        return "{{ bos_token }}" + text
    tokens = "".join(tokenizer.convert_ids_to_tokens(begin))
    return f"{{{{ {tokens!r} }}}}{text}"


def begin_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer itself puts before a text."""
    with_them: list[int] = tokenizer("x")["input_ids"]
    without: list[int] = tokenizer("x", add_special_tokens=False)["input_ids"]
    if not without:
        return [token for token in with_them if token != tokenizer.eos_token_id]
    for place in range(len(with_them) - len(without) + 1):
        if with_them[place : place + len(without)] == without:
            return with_them[:place]
    return []


def _still_clock() -> str:
    changes = "".join(f"|replace('{name}', '{value}')" for name, value in STILL.items())
    return f"{{%- macro {CLOCK}(format) -%}}{{{{ format{changes} }}}}{{%- endmacro -%}}"
