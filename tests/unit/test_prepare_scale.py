"""prepare_data in parts: any cut of the sources gives the same bytes, nothing finished is lost, every row counted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tasks.contracts import DataManifest
from tasks.data import parts, runs, shard_work
from tasks.data.order import SampleOrder
from tasks.data.prepared import Split
from tasks.errors import UserError
from tasks.paths import Paths
from tasks.prepare_data import prepare_data
from tests import tiny

# As few rows a shard, a run and a bucket as make many of each of small data.
SMALL = (
    "import sys; from tasks import prepare_data as stage; from tasks.data import parts; "
    "parts.SHARD_BYTES = (4000, 4000); parts.BUCKET_BYTES = 20000; stage.IN_PLACE_BYTES = 0; stage.main()"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("model") / "m")


def alpaca(first: int, end: int) -> list[Any]:
    return [{"instruction": f"count to {n}", "output": f"it is {n * 7}"} for n in range(first, end)]


def mixed() -> list[Any]:
    """Good rows, bad ones of three kinds, equal ones and nearly equal ones, in no order."""
    tale = "once upon a time a king had three sons and no daughter so he sent them far away"
    rows = [*alpaca(0, 300), *alpaca(40, 60), {"x": 1}, {"instruction": "q", "output": ""}, "text"]
    rows += [{"instruction": "tell", "output": f"{tale} {word}"} for word in "abcdefghijklmnop"]
    return [rows[place] for place in np.random.default_rng(3).permutation(len(rows))]


def write(root: Path, rows: list[Any], name: str = "rows.jsonl") -> str:
    file = root / "data" / "raw" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return f"data/raw/{name}"


def changes(model: Path, source: Any = "data/raw/rows.jsonl", **more: Any) -> dict[str, Any]:
    return {
        "model.name_or_path": str(model),
        "prepare_data.source": source,
        "prepare_data.format": "alpaca",
        "prepare_data.validation_fraction": 0.3,
        "prepare_data.on_bad_row": "reject",
    } | {f"prepare_data.{key}": value for key, value in more.items()}


def run(root: Path, model: Path, rows: list[Any] | None = None, **more: Any) -> DataManifest:
    if rows is not None:
        write(root, rows)
    return prepare_data(tiny.params(**changes(model, **more)), Paths(root))


def content(root: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in Paths(root).prepared.iterdir()}


def cut_small(patch: pytest.MonkeyPatch, shard: int = 4000, bucket: int = 20000) -> None:
    patch.setattr(parts, "SHARD_BYTES", (shard, shard))
    patch.setattr(parts, "BUCKET_BYTES", bucket)


def counted_reads(patch: pytest.MonkeyPatch) -> list[Any]:
    """The shards that are read from now on."""
    read: list[Any] = []
    real = shard_work.read_shard

    def counted(shard: Any) -> Any:
        read.append(shard)
        return real(shard)

    patch.setattr(shard_work, "read_shard", counted)
    return read


def ids(root: Path, name: str) -> list[str]:
    found: list[str] = Split.open(Paths(root).prepared, name).table["id"].to_pylist()
    return found


def test_any_cut_gives_the_same_bytes(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = run(tmp_path / "whole", model, mixed())
    assert manifest.rejected["duplicate"] == 20
    assert manifest.rejected["near-duplicate of a training row"] > 0
    assert manifest.rows_in == 339
    for number, (shard, bucket, run_bytes) in enumerate(
        [(700, 1000, 1), (3000, 9000, 20_000), (9000, 400, 1 << 26)]
    ):
        cut_small(monkeypatch, shard, bucket)
        monkeypatch.setattr(runs, "RUN_BYTES", run_bytes)
        monkeypatch.setattr(shard_work, "ROWS_AT_ONCE", 7)
        run(tmp_path / str(number), model, mixed())
        assert content(tmp_path / str(number)) == content(tmp_path / "whole")


def test_the_order_of_rows_changes_no_split(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_small(monkeypatch)
    one = run(tmp_path / "one", model, mixed())
    two = run(tmp_path / "two", model, list(reversed(mixed())))
    assert one.content_hash == two.content_hash
    assert one.rejected == two.rejected
    for name in ("train.arrow", "validation.arrow"):
        assert content(tmp_path / "one")[name] == content(tmp_path / "two")[name]


def test_rejected_rows_are_listed_in_the_order_of_the_source(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_small(monkeypatch)
    manifest = run(tmp_path, model, mixed())
    lines = [json.loads(line) for line in Paths(tmp_path).rejected.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == sum(manifest.rejected.values()) > 20
    assert [line["row"] for line in lines] == sorted(line["row"] for line in lines)
    assert {line["file"] for line in lines} == {"data/raw/rows.jsonl"}
    source = (tmp_path / "data" / "raw" / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    seen = source[: lines[0]["row"] - 1]
    for line in lines:
        text = source[line["row"] - 1]
        assert line["where"] == f"data/raw/rows.jsonl: line {line['row']}"
        assert line["fix"]
        seen = source[: line["row"] - 1]
        assert (line["reason"] == "duplicate") == (text in seen)


def test_a_killed_run_goes_on_where_it_was(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """kill -9 in the middle leaves no process and the old data; the next run reads only what is missing."""
    root = tmp_path / "w"
    old = run(root, model, alpaca(0, 50))
    write(root, alpaca(0, 2000))
    tiny.write_params(root, **changes(model))
    killed = subprocess.Popen(
        [sys.executable, "-c", SMALL],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(tiny.REPOSITORY)},
        stderr=subprocess.DEVNULL,
    )
    preparing = Paths(root).preparing
    deadline = time.monotonic() + 120
    while len(list(preparing.glob("*/report.json"))) < 3:
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    children = psutil.Process(killed.pid).children(recursive=True)
    assert len(children) >= 2, "other processes do the work"
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert DataManifest.read(Paths(root).manifest) == old

    cut_small(monkeypatch)
    kept = len(list(preparing.glob("*/report.json")))
    read = counted_reads(monkeypatch)
    run(root, model)
    assert kept >= 3 and len(read) > 0
    assert f"{kept} of {kept + len(read)} parts were prepared before and are kept" in capsys.readouterr().err
    assert not preparing.exists()
    run(tmp_path / "whole", model, alpaca(0, 2000))
    assert content(root) == content(tmp_path / "whole")


def test_finished_parts_are_not_read_again(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_small(monkeypatch)
    read = counted_reads(monkeypatch)
    with pytest.raises(UserError, match="max_rejected=0 allows"):
        run(tmp_path, model, mixed(), max_rejected=0)
    first = len(read)
    assert first > 3
    read.clear()
    # What decides after the rows are encoded asks for no row again ...
    run(tmp_path, model, max_rejected=0.5, validation_fraction=0.2, near_duplicate_threshold=0.9)
    assert read == []
    # ... and what says how they are encoded does.
    with pytest.raises(UserError, match="max_rejected=0 allows"):
        run(tmp_path, model, max_rejected=0)
    read.clear()
    run(tmp_path, model, max_length=80)
    assert len(read) == first


def test_too_many_bad_rows_stop_the_run_and_keep_the_old_data(tmp_path: Path, model: Path) -> None:
    run(tmp_path, model, alpaca(0, 40))
    before = content(tmp_path)
    bad = (
        [{"instruction": "q", "output": ""}] * 6 + [{"output": "a"}] * 3 + ["text"] * 2 + [{"instruction": 3}]
    )
    rows = [*alpaca(0, 60), *bad, *alpaca(0, 60)]
    with pytest.raises(UserError) as error:
        run(tmp_path, model, rows, max_rejected=0.05)
    said = str(error.value)
    assert (
        "12 of 132 rows are bad, more than prepare_data.max_rejected=0.05 allows: 6 no answer (the first is"
        in said
    )
    assert "data/raw/rows.jsonl: line 61: fill it in or remove the row" in said
    assert "; 3 no instruction (" in said and "; 2 str instead of a row (" in said
    assert "instruction is int" not in said, "the three most frequent reasons alone"
    assert content(tmp_path) == before
    manifest = run(tmp_path, model, rows, max_rejected=0.1)  # 12 of 132: the 60 duplicates are not bad rows
    assert manifest.rejected["duplicate"] == 60


def test_max_rows_counts_over_parts(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(tmp_path / "whole", model, mixed()[:150])
    cut_small(monkeypatch, shard=700)
    manifest = run(tmp_path / "cut", model, mixed(), max_rows=150)
    assert manifest.rows_in == 150
    assert manifest.content_hash == whole.content_hash
    assert manifest.rejected == whole.rejected


def test_weights_of_sources(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [
        write(tmp_path, alpaca(0, 200), "a.jsonl"),
        write(tmp_path, alpaca(200, 400), "b.jsonl"),
        write(tmp_path, alpaca(390, 600), "c.jsonl"),
    ]
    weights = (1.0, 2.5, 0.25)
    listed = [{"source": name, "weight": weight} for name, weight in zip(names, weights, strict=True)]
    manifest = run(tmp_path, model, source=listed, near_duplicate_threshold=1.0)
    a, b, c = manifest.sources
    assert manifest.balanced
    assert manifest.rows_in == 610 and manifest.rejected == {"duplicate": 10}
    assert a.train_rows + a.validation_rows == 200
    assert 2.3 < b.train_rows / (200 - b.validation_rows) < 2.7
    assert 25 < c.train_rows + c.validation_rows < 75
    assert manifest.unused == 200 - c.train_rows - c.validation_rows
    assert manifest.repeated == b.train_rows + b.validation_rows - 200
    train, held = ids(tmp_path, "train"), ids(tmp_path, "validation")
    assert len(train) == manifest.train.rows == len(set(train)) + manifest.repeated
    assert len(held) == len(set(held)) and not set(train) & set(held)
    assert "b.jsonl" in (said := capsys.readouterr().err) and "2.5" in said
    # More rows in one source take no row of another to the other side, nor out.
    write(tmp_path, alpaca(0, 390), "a.jsonl")
    write(tmp_path, alpaca(600, 900) + alpaca(390, 600), "c.jsonl")
    run(tmp_path, model, source=listed, near_duplicate_threshold=1.0)
    assert set(held) <= set(ids(tmp_path, "validation"))
    assert set(train) <= set(ids(tmp_path, "train"))


def test_leakage_is_reported(tmp_path: Path, model: Path) -> None:
    manifest = run(tmp_path, model, mixed())
    found = manifest.leakage
    assert found is not None and found.threshold == 0.8
    assert found.near_duplicates == manifest.rejected["near-duplicate of a training row"] > 0
    assert found.held_out == manifest.validation.rows + found.near_duplicates
    assert found.duplicates == manifest.rejected["duplicate"] == 20


def test_fewer_rows_than_the_global_batch_are_one_step_and_that_is_said(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """axolotl PR#3100, mmengine#945: zero steps, then a division by zero or a run that ends untrained."""
    manifest = run(tmp_path, model, alpaca(0, 8))
    rows = manifest.train.rows
    assert 0 < rows < 16
    said = (
        f"{rows} rows to train on are fewer than the global batch of 16: an epoch is one step, of all of them"
    )
    assert said in capsys.readouterr().err
    order = SampleOrder(rows, 16, seed=1)
    assert order.steps(1, Split.open(Paths(tmp_path).prepared, "train").lengths(), None) == 1
    assert sorted(order.samples(0).tolist()) == list(range(rows))


def test_rows_whose_targets_would_all_be_cut_are_counted_never_trained_on(
    tmp_path: Path, model: Path
) -> None:
    """huggingface/trl#6668: a loss of 0.0 was logged for rows without any target left."""
    lost = [{"instruction": f"{n:0100}", "output": "12345"} for n in range(8)]
    cut = {"max_length": 64, "validation_fraction": 0.5}
    with pytest.raises(UserError, match=r"8 of 8 rows are bad.*8 no answer token within max_length=64"):
        run(tmp_path, model, lost, **cut)
    assert not Paths(tmp_path).prepared.exists()
    manifest = run(tmp_path, model, [*lost, *alpaca(0, 40)], max_rejected=0.2, **cut)
    assert manifest.rejected == {"no answer token within max_length=64": 8}
    for name in ("train", "validation"):
        assert Split.open(Paths(tmp_path).prepared, name).target_counts().min() > 0
