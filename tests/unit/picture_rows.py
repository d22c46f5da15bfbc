"""Rows with pictures, written and prepared the way a user does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tasks.contracts import DataManifest
from tasks.data.prepared import Split
from tasks.params import Params
from tasks.paths import Paths
from tests import tiny
from tests.tiny_vision import write_picture

WORDS = ("red", "blue", "a cat", "a house", "two birds", "a street at night")


def settings(model: Path, name: str = "rows.json", **changes: Any) -> Params:
    keys: dict[str, Any] = {
        "model.name_or_path": str(model),
        "prepare_data.source": f"data/raw/{name}",
        "prepare_data.validation_fraction": 0.3,
        "prepare_data.near_duplicate_threshold": 1.0,
        "prepare_data.on_bad_row": "reject",
        "prepare_data.max_rejected": 1.0,
    }
    return tiny.params(**keys | changes)


def write(root: Path, rows: list[Any], name: str = "rows.json") -> Path:
    file = root / "data" / "raw" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(rows), encoding="utf-8")
    return file


def llava(number: int, **more: Any) -> dict[str, Any]:
    """As haotian-liu/LLaVA's files have it."""
    turns = [{"from": "human", "value": f"<image>\nWhat is in picture {number}?"}]
    turns.append({"from": "gpt", "value": f"It is {WORDS[number % len(WORDS)]}, number {number}."})
    return {"id": str(number), "image": f"img/{number}.png", "conversations": turns} | more


def write_pictures(root: Path, count: int) -> Path:
    folder = root / "data" / "raw" / "img"
    for number in range(count):
        write_picture(folder / f"{number}.png", 4 + number % 20, 5 + number % 13, number)
    return folder


def rejected(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Paths(root).rejected.read_text().splitlines()]


def splits(root: Path) -> list[Split]:
    return [Split.open(Paths(root).prepared, name) for name in ("train", "validation")]


def kept(manifest: DataManifest) -> int:
    return manifest.train.rows + manifest.validation.rows
