"""Pieces and mended rows of the manifest, through the whole stage: what they are counted of, and that all adds up."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tasks.contracts import DataManifest
from tasks.data.prepared import Split
from tasks.paths import Paths
from tests import tiny
from tests.unit.test_data_templates import FORGETFUL
from tests.unit.test_prepare_data import alpaca, kept, prepared

LENGTH = 60
OPEN: dict[str, Any] = {"prepare_data.max_length": LENGTH, "prepare_data.max_rejected": 1.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("counts") / "m")


def text(number: int, pieces: int) -> dict[str, str]:
    """A text that becomes so many pieces, unlike all others': a byte is a token, and it has no blanks to be cut at."""
    return {"text": f"{number:04d}" * ((LENGTH * (pieces - 1) + LENGTH // 2) // 4)}


def rejected(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Paths(root).rejected.read_text().splitlines()]


def learnt_texts(root: Path) -> Counter[str]:
    splits = [Split.open(Paths(root).prepared, name) for name in ("train", "validation")]
    return Counter(split.reference(row) for split in splits for row in range(len(split)))


def test_pieces_of_texts_are_counted_beyond_the_first(tmp_path: Path, model: Path) -> None:
    rows = [text(number, 1 + number % 3) for number in range(24)]
    manifest = prepared(tmp_path, model, rows, **OPEN)
    assert (manifest.rows_in, manifest.pieces, kept(manifest)) == (24, 24, 48)
    assert not manifest.rejected and manifest.balanced
    found = learnt_texts(tmp_path)
    assert sum(len(piece) * count for piece, count in found.items()) == sum(len(row["text"]) for row in rows)


def test_a_text_written_twice_gives_its_pieces_once(tmp_path: Path, model: Path) -> None:
    rows = [*(text(number, 2) for number in range(20)), text(3, 2), text(90, 4), text(90, 4)]
    manifest = prepared(tmp_path, model, rows, **OPEN)
    assert manifest.rows_in == 23 and manifest.pieces == 20 + 1 + 3 + 3
    assert manifest.rejected == {"duplicate": 2 + 4} and kept(manifest) == 40 + 4
    assert manifest.balanced and Counter(line["row"] for line in rejected(tmp_path)) == {21: 2, 23: 4}


def test_pieces_behind_max_rows_are_not_counted(tmp_path: Path, model: Path) -> None:
    rows = [text(number, 3) for number in range(30)]
    manifest = prepared(tmp_path, model, rows, **OPEN, **{"prepare_data.max_rows": 20})
    assert (manifest.rows_in, manifest.pieces, kept(manifest)) == (20, 40, 60) and manifest.balanced


def talk(number: int, long: int = 0) -> dict[str, Any]:
    """Two rounds, the second question `long` letters longer."""
    said = [f"q{number}", f"a{number}", "r" + "z" * long, f"b{number}"]
    turns = zip(("user", "assistant") * 2, said, strict=True)
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def forgetful(root: Path, model: Path, rows: list[Any], **changes: Any) -> DataManifest:
    (root / "mine.jinja").write_text(FORGETFUL)
    return prepared(root, model, rows, **{"prepare_data.template": "mine.jinja", **changes})


def test_pieces_that_are_bad_are_counted_and_listed(tmp_path: Path, model: Path) -> None:
    """A conversation that is learnt an answer at a time: of three the second answers lie beyond max_length."""
    rows = [talk(number, 300 if number in (4, 5, 11) else 0) for number in range(20)]
    changes = {"prepare_data.max_length": 200, "prepare_data.max_rejected": 1.0}
    manifest = forgetful(tmp_path, model, rows, **changes, **{"prepare_data.on_bad_row": "reject"})
    assert (manifest.rows_in, manifest.pieces, kept(manifest)) == (20, 20, 37)
    assert manifest.rejected == {"no answer token within max_length=200": 3} and manifest.balanced
    assert [line["row"] for line in rejected(tmp_path)] == [5, 6, 12]
    assert learnt_texts(tmp_path)["a4"] == 1 and learnt_texts(tmp_path)["b4"] == 0


def test_mended_rows_are_counted_by_fault_and_kept(tmp_path: Path, model: Path) -> None:
    odd: list[Any] = [
        {"instruction": "seven", "output": 7},
        {"instruction": "eight", "output": 8.5},
        {"messages": [{"role": "bot", "content": "x"}, {"role": "assistant", "content": "y"}]},
        {"messages": [{"role": "User", "content": "who?"}, {"role": "bot", "content": "me"}]},
        {"messages": [*talk(99)["messages"], {"role": "assistant", "content": "and more"}]},
        {"instruction": "nothing", "output": ""},
    ]
    changes = {"prepare_data.max_rejected": 0.5, "prepare_data.on_bad_row": "repair"}
    manifest = prepared(tmp_path, model, [*alpaca(20), *odd], **changes)
    assert sum(manifest.rejected.values()) == 2 and manifest.balanced and kept(manifest) == 24
    assert sum(manifest.mended.values()) == 2 + 2 + 1, manifest.mended
    assert manifest.mended["joined two assistant turns"] == 1
    assert {"read role user as user", "read role bot as assistant"} <= manifest.mended.keys()
    learnt = learnt_texts(tmp_path)
    assert learnt["7"] == learnt["8.5"] == learnt["me"] == 1
    fewer = prepared(tmp_path, model, [*alpaca(20), *odd], **changes, **{"prepare_data.max_rows": 21})
    assert list(fewer.mended.values()) == [1] and fewer.rows_in == 21, (
        "what stands behind max_rows does not count"
    )
    strict = prepared(tmp_path, model, [*alpaca(20), *odd], **changes | {"prepare_data.on_bad_row": "reject"})
    assert not strict.mended and sum(strict.rejected.values()) == len(odd)


def test_mended_and_cut_rows_of_many_shards_add_up(tmp_path: Path, model: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tasks.data.parts.SHARD_BYTES", (400, 400))
    rows: list[Any] = [
        text(number, 1 + number % 3) if number % 2 else {"prompt": f"{number}=", "completion": number}
        for number in range(80)
    ]
    changes = {**OPEN, "prepare_data.on_bad_row": "repair"}
    manifest = prepared(
        tmp_path, model, "".join(json.dumps(row) + "\n" for row in rows), "rows.jsonl", **changes
    )
    pieces = sum(number % 3 for number in range(80) if number % 2)
    assert (manifest.rows_in, manifest.pieces, kept(manifest), manifest.rejected) == (
        80,
        pieces,
        80 + pieces,
        {},
    )
    assert sum(manifest.mended.values()) == 40 and len(manifest.mended) == 1
