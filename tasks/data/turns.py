"""Turns of a chat as sources write them: ShareGPT, OpenAI's messages, content in parts, tool calls and results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tasks.data.columns import View
from tasks.data.pictures import MARK, image_of
from tasks.data.rows import ROLES, BadRow, ImageRef, quoted
from tasks.data.tools import calls_of, json_text

SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
    "observation": "tool",
    "tool": "tool",
    "function": "tool",
    "tool_response": "tool",
    # an assistant's turn whose text is its calls
    "function_call": "assistant",
    "tool_call": "assistant",
}
CALLERS = ("function_call", "tool_call")
# Plain in what they mean, but no format's: read only under on_bad_row: repair.
OBVIOUS = {
    "bot": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "claude": "assistant",
    "llm": "assistant",
    "chatbot": "assistant",
    "prompter": "user",
    "instruction": "user",
    "tool_output": "tool",
}
# What a turn may carry that would silently be left out of its text.
REFUSED_OF_TURN = (
    *("images", "image", "videos", "video", "audios", "audio", "tools", "functions"),
    *("reasoning_content", "reasoning", "thinking"),
)
# Whether a turn is learnt: OpenAI's files, ms-swift's, axolotl's.
LEARNT_KEYS = ("weight", "loss", "train")
EMPTY: tuple[Any, ...] = (None, "", "[]", "{}", [], {})
TEXT_PARTS = ("text", "input_text", "output_text")
IMAGE_PARTS = ("image", "image_url", "input_image")


@dataclass(slots=True)
class Turn:
    """`content` is text in a sound row. `answers`: the id of the call that a tool's turn answers."""

    role: str
    content: Any
    calls: list[dict[str, Any]] = field(default_factory=list)
    learnt: bool = True
    answers: str = ""


def listed(value: Any, name: str, view: View) -> list[Any]:
    """A list that may be written as its JSON text, as a cell of a table is.

    Raises:
        BadRow: it is no list.
    """
    if isinstance(value, str):
        value = _from_text(value, name, view)
    if (
        isinstance(value, Mapping) and value
    ):  # datasets' Sequence of objects: {"role": [...], "content": [...]}
        lengths = {len(item) if isinstance(item, list) else -1 for item in value.values()}
        if len(lengths) == 1 and -1 not in lengths:
            return [dict(zip(value, items, strict=True)) for items in zip(*value.values(), strict=True)]
    if not isinstance(value, list):
        raise BadRow(
            f"{name} is {type(value).__name__}, not a list", "write it as a list", quoted(value), "a list"
        )
    return value


def _from_text(text: str, name: str, view: View) -> Any:
    if not text.lstrip().startswith(("[", "{")):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        fault = str(error)
    if view.repair:
        import ast

        try:
            value = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            pass
        else:
            view.mended.append("read a Python list as JSON")
            return value
    raise BadRow(f"{name} is text that is no JSON", "write it with json.dumps", f"{fault} in {quoted(text)}")


def chat_turns(turns: Sequence[Any], view: View, images: list[ImageRef]) -> list[Turn]:
    """The turns, with the pictures that stand among their content added to `images`.

    Raises:
        BadRow: a turn is no turn, has an unknown role, or carries what cannot be learnt.
    """
    read: list[Turn] = []
    calling = False
    for number, said in enumerate(turns, 1):
        turn, caller = _turn(
            _from_text(said, f"turn {number}", view) if isinstance(said, str) else said, number, view, images
        )
        if caller and calling:  # several calls at once, a turn each
            read[-1].calls += turn.calls
        else:
            read.append(turn)
        calling = caller
    return _results_in_order(read)


def _turn(said: Any, number: int, view: View, images: list[ImageRef]) -> tuple[Turn, bool]:
    if not isinstance(said, Mapping):
        raise BadRow(
            f"a turn is {type(said).__name__}",
            "write it as {role, content} or {from, value}",
            f"turn {number}: {quoted(said)}",
        )
    speaker = _first(said, view.columns.get("role"), "role", "from")
    content = _first(said, view.columns.get("content"), "content", "value")
    role = _role(speaker, number, view)
    if speaker in CALLERS:
        return Turn(role, "", calls_of(content), _learnt(said)), True
    turn = Turn(role, "" if content is None else content)
    if not isinstance(content, str) and content is not None:
        turn.content = _content(content, role, number, images)
    if len(said) > 2 or content is None:
        _extras(said, turn, number)
    return turn, False


def _first(said: Mapping[str, Any], mapped: str | None, *names: str) -> Any:
    if mapped is not None:
        return said.get(mapped)
    return next((said[name] for name in names if said.get(name) is not None), None)


def _role(speaker: Any, number: int, view: View) -> str:
    if isinstance(speaker, str):
        if view.columns:
            for role in ROLES:
                if view.columns.get(role) == speaker:
                    return role
        if speaker in SPEAKERS:
            return SPEAKERS[speaker]
        plain = speaker.strip().lower()
        meant = SPEAKERS.get(plain) or OBVIOUS.get(plain)
        if view.repair and meant and plain not in CALLERS:
            view.mended.append(f"read role {plain} as {meant}")
            return meant
    allowed = [*(view.columns[role] for role in ROLES if role in view.columns), *SPEAKERS]
    raise BadRow(
        "unknown role",
        "use an allowed role, or say what yours is called, e.g. prepare_data.columns: {user: …, assistant: …}",
        f"{quoted(speaker, 40)} in turn {number}",
        ", ".join(allowed),
    )


def _extras(said: Mapping[str, Any], turn: Turn, number: int) -> None:
    for key in REFUSED_OF_TURN:
        if said.get(key) not in EMPTY:
            raise BadRow(
                f"a turn has {key}, which is not learnt there",
                f"write it in the turn's text or remove {key}",
                f"turn {number}",
            )
    for key in ("tool_calls", "function_call"):
        if said.get(key) not in EMPTY:
            if turn.role != "assistant":
                raise BadRow(
                    f"a {turn.role} turn has {key}", "only an assistant's turn calls tools", f"turn {number}"
                )
            turn.calls += calls_of(said[key])
    turn.learnt = _learnt(said)
    answers = said.get("tool_call_id")
    if turn.role == "tool" and isinstance(answers, str):
        turn.answers = answers


def _learnt(said: Mapping[str, Any]) -> bool:
    for key in LEARNT_KEYS:
        value = said.get(key)
        if value is None:
            continue
        if value not in (0, 1):
            raise BadRow(
                f"a turn's {key} is neither 0 nor 1",
                "a turn is learnt whole or not at all",
                quoted(value),
                "0, 1",
            )
        if not value:
            return False
    return True


def _content(content: Any, role: str, number: int, images: list[ImageRef]) -> Any:
    in_parts = isinstance(content, list) and all(
        isinstance(part, str) or (isinstance(part, Mapping) and isinstance(part.get("type"), str))
        for part in content
    )
    if in_parts and content:
        return "".join(_part(part, number, images) for part in content)
    if role == "tool" and isinstance(content, Mapping | list):
        return json_text(content, "a tool's result")
    return content


def _part(part: Any, number: int, images: list[ImageRef]) -> str:
    if isinstance(part, str):
        return part
    kind = part["type"]
    if kind in TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind in IMAGE_PARTS:
        said = next(
            (part[key] for key in ("image_url", "image", "url", "path", "bytes") if part.get(key)), None
        )
        if said is not None:  # else it stands for one of the row's own images
            images.append(image_of(part if isinstance(part.get("bytes"), bytes | str) else said))
        return MARK
    raise BadRow(
        "a part of a turn that is neither text nor an image",
        "write text parts as {type: text, text: …}, images as {type: image, …}",
        f"type {quoted(kind)} in turn {number}",
        "text, image, image_url",
    )


def _results_in_order(turns: list[Turn]) -> list[Turn]:
    """Results in the order of the calls that they answer, by the calls' ids."""
    ordered: list[Turn] = []
    place = 0
    while place < len(turns):
        turn = turns[place]
        ordered.append(turn)
        place += 1
        ids = [call.get("id") for call in turn.calls]
        end = place
        while turn.calls and end < len(turns) and turns[end].role == "tool":
            end += 1
        results = turns[place:end]
        if results and all(ids) and all(result.answers for result in results):
            stray = next((result.answers for result in results if result.answers not in ids), None)
            if stray is not None:
                raise BadRow(
                    "a tool's result answers no call before it",
                    "give it the id of its call",
                    quoted(stray),
                    ", ".join(map(str, ids)),
                )
            results = sorted(results, key=lambda result: ids.index(result.answers))
        ordered += results
        place = end if results else place
    return ordered
