"""Rows as sources write them -> canonical rows."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.data.columns import (
    ALIASES,
    NEEDED,
    OF_TURNS,
    REFUSED,
    UNMAPPED,
    Form,
    View,
    check_columns,
    nearest,
)
from tasks.data.pictures import check_marks, images_of
from tasks.data.repair import mend
from tasks.data.rows import ROLES, BadRow, ImageRef, Kind, Row, check, quoted, written
from tasks.data.shards import RawRow
from tasks.data.tools import calls_text, tools_text
from tasks.data.turns import EMPTY, Turn, chat_turns, listed
from tasks.errors import UserError
from tasks.params import Format

__all__ = ["RawRow", "canonical", "detect", "form_of"]


# An alpaca row may lack its output; that is its own fault, not its format's.
TELLING: dict[Form, tuple[str, ...]] = {**NEEDED, "alpaca": ("instruction",)}


def form_of(content: Mapping[str, Any], columns: Mapping[str, str] = UNMAPPED) -> tuple[Form, str] | None:
    """(format, the column that tells it) of one row, by its columns alone: whether they are filled does not matter."""
    # What is mapped was meant.
    forms = sorted(NEEDED, key=lambda form: columns.keys().isdisjoint(NEEDED[form])) if columns else NEEDED
    for form in forms:
        theirs = [_named(content, columns, name) for name in TELLING[form]]
        if None not in theirs:
            return form, " and ".join(str(name) for name in theirs)
    return None


def _named(content: Mapping[str, Any], columns: Mapping[str, str], name: str) -> str | None:
    if name in columns:
        return columns[name] if columns[name] in content else None
    if name in content:
        return name
    for alias in ALIASES.get(name, ()):
        if alias in content:
            return alias
    return None


def detect(
    rows: Sequence[RawRow | tuple[str, BadRow]],
    source: str,
    columns: Mapping[str, str] = UNMAPPED,
    wanted: Format = "auto",
) -> tuple[Form, str]:
    """(format, the evidence in words) of a source, from its first rows.

    Under `auto` each row is read by its own columns, so this only tells what to expect: the order of rows decides
    nothing. A column that is mapped or needed must be in one of the rows.

    Raises:
        UserError: no row has a known format's columns, or one is missing: with the columns found and the nearest.
    """
    mappings = [
        (row, row.content) for row in rows if isinstance(row, RawRow) and isinstance(row.content, Mapping)
    ]
    found: dict[str, None] = dict.fromkeys(str(key) for _, content in mappings for key in content)
    if wanted != "auto":
        check_columns(source, wanted, columns, found)
        return wanted, "params.yaml says so"
    seen: dict[Form, str] = {}
    for row, content in mappings:
        known = form_of(content, columns)
        if known and known[0] not in seen:
            seen[known[0]] = f"{row.where.rsplit(': ', 1)[-1]} has {known[1]}"
    if not seen:
        raise _unknown(source, list(found), columns)
    form, evidence = next(iter(seen.items()))
    check_columns(source, form, columns, found)
    others = [f"{said} ({other})" for other, said in seen.items() if other != form]
    return form, "; but ".join([evidence, *others])


def _unknown(source: str, found: list[str], columns: Mapping[str, str]) -> UserError:
    for ours, theirs in columns.items():
        if theirs not in found and ours not in (*OF_TURNS, *ROLES):
            try:
                check_columns(source, "text", {ours: theirs}, found)
            except UserError as error:
                return error
    hint = "alpaca rows have instruction and output, chat rows have messages or conversations, "
    for form, needed in NEEDED.items():
        near = {name: nearest(name, found) for name in needed}
        if found and form != "completion" and all(near.values()):
            mapping = ", ".join(f"{name}: {theirs}" for name, theirs in near.items())
            hint = f"if they are {form} rows, set prepare_data.columns: {{{mapping}}}; else {hint}"
            break
    return UserError(
        f"prepare_data.source={source}: rows with {', '.join(sorted(found)) or 'no keys'} are of no known format; "
        f"{hint}completion rows have prompt and completion, plain text has text"
    )


def canonical(raw: RawRow, form: Format, columns: Mapping[str, str] = UNMAPPED, repair: bool = False) -> Row:
    """One row in canonical form; under `auto` of the format that its own columns tell.

    Args:
        columns: our names to the source's, as params.yaml maps them.
        repair: mend what is plain; the row's `mended` says what was.

    Raises:
        BadRow: it cannot be learnt from.
    """
    if not isinstance(raw.content, Mapping):
        raise BadRow(
            f"{type(raw.content).__name__} instead of a row", "write it as { … }", quoted(raw.content)
        )
    view = View(raw.content, columns, repair)
    for key in REFUSED:
        if key in raw.content and raw.content[key] not in EMPTY:
            raise BadRow(f"it has {key}, which is not learnt", f"remove {key} or the row")
    if form == "auto":
        known = form_of(raw.content, columns)
        if known is None:
            has = ", ".join(str(key) for key in raw.content)
            raise BadRow(
                "of no known format", "write it like the others or remove it", f"columns {has or 'none'}"
            )
        form = known[0]
    images: list[ImageRef] = []
    kind, turns = _READERS[form](view, images)
    return _row(raw, view, kind, turns, images)


def _row(raw: RawRow, view: View, kind: Kind, turns: list[Turn], images: list[ImageRef]) -> Row:
    counted = bool(images) or view.has("images")
    if counted:
        images = _all_images(view, images)
    if view.repair:
        turns, done = mend(turns, kind == "chat", len(images))
        view.mended += done
    messages = check(
        [(turn.role, turn.content) for turn in turns],
        kind,
        [number for number, turn in enumerate(turns) if turn.calls],
    )
    if counted:
        check_marks((content for _, content in messages), len(images))
    unlearnt = tuple(
        number for number, turn in enumerate(turns) if turn.role == "assistant" and not turn.learnt
    )
    if len(unlearnt) == sum(turn.role == "assistant" for turn in turns):
        raise BadRow("no answer that is learnt", "give one of its turns weight 1 or remove the row")
    tools = view.get("tools")
    if tools not in EMPTY and kind != "chat":
        raise BadRow(f"a {kind} row has tools", "write it as messages, or remove tools")
    return Row(
        messages,
        _group(view, messages, images),
        raw.where,
        kind,
        tools_text(tools) if tools not in EMPTY else "",
        tuple((number, calls_text(turn.calls)) for number, turn in enumerate(turns) if turn.calls),
        tuple(images),
        unlearnt,
        tuple(view.mended),
    )


def _group(view: View, messages: tuple[tuple[str, str], ...], images: list[ImageRef]) -> str:
    """What the source says rows have in common, if its column is mapped; else the content, so only equals meet."""
    said = view.get("group") if "group" in view.columns else None
    return content_group(messages, images) if said is None else str(said)


def content_group(messages: tuple[tuple[str, str], ...], images: Sequence[ImageRef]) -> str:
    """The group of a row that its source puts in none."""
    digest = hashlib.sha256(written(messages).encode())
    for image in images:
        digest.update(image.place.encode() + hashlib.sha256(image.content or b"").digest())
    return digest.hexdigest()


def _all_images(view: View, among: list[ImageRef]) -> list[ImageRef]:
    """The row's own pictures, or those that stand among its turns' content."""
    if "images" not in view.columns and all(
        view.content.get(key) not in EMPTY for key in ("images", "image")
    ):
        raise BadRow("it has both images and image", "keep one of them")
    own = images_of(view.get("images"))
    if own and among:
        raise BadRow(
            "images stand both in the row and among its turns",
            "list them once",
            f"{len(own)} and {len(among)}",
        )
    return own or among


def _text_of(view: View, name: str) -> Any:
    value = view.get(name)
    if value is None and not view.has(name):
        raise view.lacks(name)
    return value


def _alpaca(view: View, images: list[ImageRef]) -> tuple[Kind, list[Turn]]:
    instruction, given = _text_of(view, "instruction"), view.get("input")
    for name, value in (("instruction", instruction), ("input", given)):
        if not isinstance(value, str) and (value is not None or name == "instruction"):
            raise BadRow(
                f"{name} is {type(value).__name__}, not text",
                "fill it in or remove the row",
                quoted(value),
                "text",
            )
    turns = _system(view)
    history = view.get("history")
    for pair in listed(history, "history", view) if history not in EMPTY else ():
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise BadRow(
                "history is no list of [question, answer] pairs",
                "write it as [[question, answer], …]",
                quoted(pair),
            )
        turns += [Turn("user", pair[0]), Turn("assistant", pair[1])]
    turns.append(Turn("user", "\n".join(part for part in (instruction, given) if part)))
    output = view.get("output")
    turns.append(Turn("assistant", "" if output is None else output))
    return "chat", turns


def _system(view: View) -> list[Turn]:
    system = view.get("system")
    return [Turn("system", system)] if system not in (None, "") else []


def _chat(view: View, images: list[ImageRef]) -> tuple[Kind, list[Turn]]:
    turns = listed(_text_of(view, "messages"), "messages", view)
    return "chat", _system(view) + chat_turns(turns, view, images)


def _completion(view: View, images: list[ImageRef]) -> tuple[Kind, list[Turn]]:
    halves = {name: _text_of(view, name) for name in ("prompt", "completion")}
    if all(_is_plain(half) for half in halves.values()):
        return "completion", [Turn("user", halves["prompt"]), Turn("assistant", halves["completion"])]
    for name, half in halves.items():
        if half is None:
            raise BadRow(
                "no answer" if name == "completion" else f"no {name}", "fill it in or remove the row"
            )
    before = chat_turns(listed(halves["prompt"], "prompt", view), view, images)
    for turn in before:
        turn.learnt = False
    return "chat", _system(view) + before + chat_turns(
        listed(halves["completion"], "completion", view), view, images
    )


def _is_plain(half: Any) -> bool:
    """Whether it is a text (or a number in its place, which is mended or refused later) and no list of turns."""
    if isinstance(half, str):
        return not half.lstrip().startswith("[{")
    return isinstance(half, int | float) and not isinstance(half, bool)


def _text(view: View, images: list[ImageRef]) -> tuple[Kind, list[Turn]]:
    text = _text_of(view, "text")
    return "text", [Turn("assistant", "" if text is None else text)]


_READERS = {"alpaca": _alpaca, "chat": _chat, "completion": _completion, "text": _text}
