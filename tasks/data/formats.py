"""Files and hub data sets -> canonical rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tasks.data.rows import BadRow, Row, check
from tasks.errors import UserError

Format = Literal["alpaca", "chat"]
SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
}


# What a row may carry that would silently be left out of its text.
NOT_LEARNT = ("images", "image", "videos", "audios", "tools", "tool_calls", "functions")
EMPTY = (None, "", "[]", "{}", [], {})


@dataclass(frozen=True)
class RawRow:
    """A row as it stood in its source; `where` names file and row for the user."""

    content: Any
    where: str


def read_file(path: Path, name: str) -> list[RawRow]:
    """The rows of a .json list or of a .jsonl file (byte-order mark and CRLF tolerated).

    `name` is how the user wrote the path: rejected.jsonl must not depend on where the workspace lies.

    Raises:
        UserError: missing, empty, of another kind, or not JSON.
    """
    if path.is_dir():
        raise UserError(f"prepare_data.source={name} is a folder; give one .json or .jsonl file in it")
    if not path.is_file():
        raise UserError(
            f"prepare_data.source={name} does not exist; give the path of a .json or .jsonl file, "
            "the id of a Hugging Face data set (owner/name), or docstrings"
        )
    kind = path.suffix.lower()
    if kind not in (".json", ".jsonl"):
        raise UserError(
            f"prepare_data.source={name} ends in {path.suffix or 'nothing'}; give a .json or .jsonl file"
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 at byte {error.start}; save it as UTF-8") from None
    if not text.strip():
        raise UserError(f"prepare_data.source={name} is empty; give a file with at least two rows")
    rows = _read_list(name, text) if kind == ".json" else _read_lines(name, text)
    if not rows:
        raise UserError(f"prepare_data.source={name} holds no rows; give a file with at least two rows")
    return rows


def _read_list(name: str, text: str) -> list[RawRow]:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{name} is not valid JSON at line {error.lineno} ({error.msg}); mend it, or name it .jsonl "
            "if it holds a row a line"
        ) from None
    if not isinstance(content, list):
        raise UserError(f"{name} holds one {type(content).__name__}, not a list of rows; put the rows in [ ]")
    return [RawRow(row, f"{name}: row {number}") for number, row in enumerate(content, 1)]


def _read_lines(name: str, text: str) -> list[RawRow]:
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            rows.append(RawRow(json.loads(line), f"{name}: line {number}"))
        except json.JSONDecodeError as error:
            raise UserError(
                f"{name}: line {number} is not valid JSON ({error.msg}); mend that line"
            ) from None
    return rows


def read_hub(name: str, max_rows: int | None) -> list[RawRow]:
    """The first `max_rows` (None: all) of the split `train` of a Hugging Face data set.

    Raises:
        UserError: not found, or no network.
    """
    from datasets import load_dataset

    try:
        table = load_dataset(name, split="train")
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"prepare_data.source={name} is no file here and could not be fetched as a Hugging Face data set "
            f"({reason}); check the name and the network, or give a local .json or .jsonl file"
        ) from None
    wanted = table.select(range(min(max_rows or len(table), len(table))))
    return [RawRow(row, f"{name}: row {number}") for number, row in enumerate(wanted, 1)]


def rows_hash(rows: list[RawRow]) -> str:
    """Hash of raw rows by content (a hub data set's own fingerprint depends on the machine)."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(
            json.dumps(row.content, sort_keys=True, default=lambda odd: type(odd).__name__).encode()
        )
    return digest.hexdigest()


def detect(rows: list[RawRow], source: str) -> tuple[Format, str]:
    """(format, the evidence in words), from the first row that has a known key.

    Raises:
        UserError: no row has one.
    """
    mappings = [row for row in rows if isinstance(row.content, Mapping)]
    for row in mappings:
        for key in ("messages", "conversations"):
            if key in row.content:
                return "chat", f"{row.where.rsplit(': ', 1)[-1]} has {key}"
        if "instruction" in row.content:
            return "alpaca", f"{row.where.rsplit(': ', 1)[-1]} has instruction"
    keys = sorted(mappings[0].content) if mappings else []
    raise UserError(
        f"prepare_data.source={source}: rows with {', '.join(map(str, keys)) or 'no keys'} are of no known format; "
        "alpaca rows have instruction and output, chat rows have messages or conversations"
    )


def canonical(raw: RawRow, form: Format) -> Row:
    """One row in canonical form.

    Raises:
        BadRow: it cannot be learnt from.
    """
    if not isinstance(raw.content, Mapping):
        raise BadRow(f"{type(raw.content).__name__} instead of a row", "write it as { … }")
    _refuse_what_is_not_learnt(raw.content)
    turns = _alpaca(raw.content) if form == "alpaca" else _chat(raw.content)
    messages = check(list(turns))
    group = hashlib.sha256(json.dumps(messages, ensure_ascii=False).encode()).hexdigest()
    return Row(messages, group, raw.where)


def _refuse_what_is_not_learnt(row: Mapping[str, Any]) -> None:
    for key in NOT_LEARNT:
        if row.get(key) not in EMPTY:
            raise BadRow(f"it has {key}, and only text is learnt", f"remove {key} or the row")


def _alpaca(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    instruction, given = row.get("instruction"), row.get("input")
    if not isinstance(instruction, str):
        raise BadRow(f"instruction is {type(instruction).__name__}, not text", "fill it in or remove the row")
    if row.get("system"):
        yield "system", row["system"]
    history = row.get("history") or []
    if not isinstance(history, list) or any(
        not isinstance(pair, list | tuple) or len(pair) != 2 for pair in history
    ):
        raise BadRow("history is no list of [question, answer] pairs", "write it as [[question, answer], …]")
    for question, answer in history:
        yield "user", question
        yield "assistant", answer
    if given is not None and not isinstance(given, str):
        raise BadRow(f"input is {type(given).__name__}, not text", "write it as text or leave it empty")
    yield "user", "\n".join(part for part in (instruction, given) if part)
    yield "assistant", "" if row.get("output") is None else row["output"]


def _chat(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    key = "conversations" if row.get("messages") is None and "conversations" in row else "messages"
    turns = row.get(key)
    if not isinstance(turns, list):
        raise BadRow(f"{key} is {type(turns).__name__}, not a list of turns", "write it as a list of turns")
    if row.get("system"):
        yield "system", row["system"]
    for turn in turns:
        if not isinstance(turn, Mapping):
            raise BadRow(f"a turn is {type(turn).__name__}", "write it as {role, content} or {from, value}")
        speaker = turn.get("role", turn.get("from"))
        content = turn.get("content", turn.get("value"))
        _refuse_what_is_not_learnt(turn)
        if not isinstance(speaker, str) or speaker not in SPEAKERS:
            raise BadRow(f"unknown role {speaker!r}", f"use one of {', '.join(SPEAKERS)}")
        yield SPEAKERS[speaker], "" if content is None else content
