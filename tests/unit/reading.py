"""Reads a source the way the stage does, whole."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tasks.data.formats import canonical
from tasks.data.rows import BadRow, Row
from tasks.data.shards import RawRow, read_shard, shards_of
from tasks.data.sources import Source, sources_of
from tests import tiny

Read = list[RawRow | tuple[str, BadRow]]
WHOLE = 1 << 40


def source(root: Path, name: str, **keys: Any) -> Source:
    wanted = tiny.params(
        **{f"prepare_data.{key}": value for key, value in keys.items()} | {"prepare_data.source": name}
    )
    (found,) = sources_of(wanted.prepare_data, root)
    return found


def raw_rows(root: Path, name: str, target: int = WHOLE, **keys: Any) -> Read:
    """Every row of every shard, cut at about `target` bytes."""
    shards = shards_of([source(root, name, **keys)], target)
    return [row for shard in shards for row in read_shard(shard)]


def contents(rows: Iterable[RawRow | tuple[str, BadRow]]) -> list[Any]:
    return [str(row[1]) if isinstance(row, tuple) else row.content for row in rows]


def wheres(rows: Iterable[RawRow | tuple[str, BadRow]]) -> list[str]:
    return [row[0] if isinstance(row, tuple) else row.where for row in rows]


def read(root: Path, name: str, target: int = WHOLE, **keys: Any) -> tuple[list[Row], dict[str, str]]:
    """(the rows that can be learnt, what is wrong with the others by where they stand)."""
    found = source(root, name, **keys)
    kept: list[Row] = []
    bad: dict[str, str] = {}
    for row in raw_rows(root, name, target, **keys):
        if isinstance(row, tuple):
            bad[row[0]] = str(row[1])
            continue
        try:
            kept.append(canonical(row, found.form, found.columns, keys.get("on_bad_row") == "repair"))
        except BadRow as error:
            bad[row.where] = str(error)
    return kept, bad


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path
