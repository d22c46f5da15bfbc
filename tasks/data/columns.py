"""Our names for a row's parts -> what a source calls them, and what to say where they do not meet."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from typing import Any, Literal

from tasks.data.rows import ROLES, BadRow
from tasks.errors import UserError

Form = Literal["alpaca", "chat", "completion", "text"]

NEEDED: dict[Form, tuple[str, ...]] = {
    "chat": ("messages",),
    "completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
OPTIONAL = ("input", "system", "history", "tools", "images", "group")
# Of a turn, not of a row; and what the source calls its speakers.
OF_TURNS = ("role", "content")
NAMES = (*(name for names in NEEDED.values() for name in names), *OPTIONAL, *OF_TURNS, *ROLES)
# Other names that are read without being told.
ALIASES = {"messages": ("conversations",), "images": ("image",), "tools": ("functions",)}
# What others call our columns; only to suggest.
OTHERS_SAY = {
    "messages": ("conversation", "dialogue", "dialog", "chat", "turns"),
    "instruction": ("question", "query", "prompt", "problem", "user", "inputs"),
    "output": ("response", "answer", "completion", "target", "solution", "assistant", "reply", "targets"),
    "input": ("context",),
    "prompt": ("question", "query", "instruction", "input", "inputs"),
    "completion": ("response", "answer", "output", "target", "targets"),
    "text": ("content", "document", "body", "raw_content"),
}
# What a row may carry that would silently be left out of what is learnt.
REFUSED = ("videos", "video", "audios", "audio", "tool_calls")
UNMAPPED: Mapping[str, str] = {}


def read_columns(columns: Mapping[str, str]) -> set[str]:
    """Every column that any format may read: of a table only these are decoded."""
    rows = [name for names in NEEDED.values() for name in names] + list(OPTIONAL)
    aliases = [alias for names in ALIASES.values() for alias in names]
    return {*rows, *aliases, *columns.values(), *REFUSED}


def check_names(columns: Mapping[str, str]) -> None:
    """Refuses a mapping of a name that no format has.

    Raises:
        UserError: with the nearest name.
    """
    for ours in columns:
        if ours not in NAMES:
            near = difflib.get_close_matches(ours, NAMES, n=1, cutoff=0.5)
            known = ", ".join(dict.fromkeys(NAMES))
            raise UserError(
                f"prepare_data.columns: {ours} is no part of a row; "
                + (f"did you mean {near[0]}?" if near else f"map {known} to the source's names")
            )


def nearest(ours: str, found: Collection[str]) -> str | None:
    """The column of the source that most likely is our `ours`."""
    lower = {name.lower(): name for name in found}
    for name in (ours, *OTHERS_SAY.get(ours, ())):
        if name in lower:
            return lower[name]
    close = difflib.get_close_matches(ours, lower, n=1, cutoff=0.6)
    return lower[close[0]] if close else None


def check_columns(source: str, form: Form, columns: Mapping[str, str], found: Collection[str]) -> None:
    """Refuses a source that lacks a column which is mapped or which every row of the format needs.

    Raises:
        UserError: with the columns it has and the nearest name.
    """
    has = ", ".join(sorted(found)) or "none"
    # "system" may be a column or a speaker; it is a speaker where others' names are mapped too.
    speakers = ROLES if any(role in columns for role in ROLES if role != "system") else ()
    for ours, theirs in columns.items():
        if ours in (*OF_TURNS, *speakers) or theirs in found:
            continue
        near = difflib.get_close_matches(theirs, found, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "name one of these"
        raise UserError(
            f"prepare_data.columns: {ours}: {theirs} is no column of {source}, which has {has}; {hint}"
        )
    lacking = [
        name
        for name in NEEDED[form]
        if columns.get(name, name) not in found and not (set(ALIASES.get(name, ())) & set(found))
    ]
    if not lacking:
        return
    taken = set(columns.values()) | set(NEEDED[form])
    mapping = {name: nearest(name, set(found) - taken) for name in lacking}
    said = ", ".join(f"{name}: {near or '…'}" for name, near in mapping.items())
    raise UserError(
        f"prepare_data.source={source}: {form} rows need {' and '.join(NEEDED[form])}, and its columns are {has}; "
        f"set prepare_data.columns: {{{said}}}, or another prepare_data.format"
    )


class View:
    """A row by our names, with what was mended on the way. A missing value, null and NaN are all None."""

    __slots__ = ("columns", "content", "mended", "repair")

    def __init__(self, content: Mapping[str, Any], columns: Mapping[str, str], repair: bool) -> None:
        self.content, self.columns, self.repair = content, columns, repair
        self.mended: list[str] = []

    def get(self, name: str) -> Any:
        value = self.content.get(self.columns.get(name, name))
        if value is None and name in ALIASES and name not in self.columns:
            value = next(
                (self.content[alias] for alias in ALIASES[name] if self.content.get(alias) is not None), None
            )
        # pandas writes NaN for what is missing
        return None if isinstance(value, float) and math.isnan(value) else value

    def has(self, name: str) -> bool:
        """Whether the row has the column, be it null."""
        if self.columns.get(name, name) in self.content:
            return True
        return name not in self.columns and any(alias in self.content for alias in ALIASES.get(name, ()))

    def lacks(self, name: str) -> BadRow:
        theirs = self.columns.get(name, name)
        has = [str(key) for key in self.content]
        near = nearest(name, has)
        fix = (
            f"set prepare_data.columns: {{{name}: {near}}}, or"
            if near and near != theirs
            else "fill it in or"
        )
        return BadRow(
            f"no {theirs}", f"{fix} remove the row", f"columns {', '.join(has[:12])}" if has else "no column"
        )
