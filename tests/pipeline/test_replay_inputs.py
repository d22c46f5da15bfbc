"""What a replay reads is what was registered, wherever git or DVC keeps it, and a difference is named first."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tasks.commands.replay_inputs import write_params
from tasks.commands.reproduce import ReproduceReport, _mismatch
from tasks.contracts import BaseModelRef, DataManifest, EvalReport, Score, SplitCounts
from tasks.paths import Paths
from tasks.registry import Registered
from tests import tiny

ROWS = "data/raw/rows.json"
BASE = BaseModelRef(
    name_or_path="model",
    revision=None,
    kind="folder",
    weights="source",
    content_hash="b" * 64,
    source_hash="b" * 64,
    trust_remote_code=False,
)


def do(root: Path, *command: str) -> None:
    subprocess.run(command, cwd=root, check=True, capture_output=True)


def commit(root: Path) -> None:
    do(root, "git", "add", "-A")
    do(root, "git", "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "now")


@pytest.fixture
def original(tmp_path: Path) -> Paths:
    """A workspace whose registered revision is its first commit; rows and model have changed since."""
    root = tmp_path / "workspace"
    (root / "data" / "raw").mkdir(parents=True)
    tiny.write_params(root, **{"prepare_data.source": ROWS, "model.name_or_path": "model"})
    (root / "model").mkdir()
    (root / "model" / "config.json").write_text("then")
    (root / ROWS).write_text("then")
    do(root, "git", "init", "-q")
    do(root, "dvc", "init", "-q")
    do(root, "dvc", "add", "-q", ROWS)
    commit(root)
    (root / ROWS).write_text("now")
    (root / "model" / "config.json").write_text("now")
    do(root, "dvc", "add", "-q", ROWS)
    commit(root)
    return Paths(root)


def replayed(original: Paths, base: BaseModelRef = BASE) -> tuple[dict[str, object], Paths]:
    """The params of a replay of the first commit, and the workspace that it happens in."""
    replay = Paths(original.root.parent / "replay")
    do(original.root, "git", "worktree", "add", "-q", "--detach", str(replay.root), "HEAD~1")
    write_params(original.params, base, original, replay)
    return YAML(typ="safe").load(replay.params.read_text()), replay


def test_rows_and_model_are_those_of_the_revision(original: Paths) -> None:
    raw, replay = replayed(original)
    assert raw["prepare_data"]["source"] == ROWS
    assert (replay.root / ROWS).read_text() == "then"
    assert (replay.root / raw["model"]["name_or_path"] / "config.json").read_text() == "then"
    assert raw["register"]["tracking_uri"].startswith(f"sqlite:///{replay.root}")
    assert (original.root / ROWS).read_text() == "now"


def test_rows_come_from_the_remote_when_the_cache_has_lost_them(original: Paths, tmp_path: Path) -> None:
    # Named in config.local alone, as a remote's password is.
    do(original.root, "dvc", "remote", "add", "--local", "-d", "store", str(tmp_path / "remote"))
    do(original.root, "dvc", "push", "-q", "--all-commits")
    shutil.rmtree(original.root / ".dvc" / "cache")
    _, replay = replayed(original)
    assert (replay.root / ROWS).read_text() == "then"


@pytest.mark.parametrize("kept", [True, False])
def test_rows_kept_nowhere_are_taken_as_they_are_and_that_is_said(
    original: Paths, capsys: pytest.CaptureFixture[str], kept: bool
) -> None:
    source = ROWS
    if kept:
        shutil.rmtree(original.root / ".dvc" / "cache")
    else:
        source = "mine.json"
        (original.root / source).write_text("now")
        tiny.write_params(original.root, **{"prepare_data.source": source, "model.name_or_path": "model"})
    raw, _ = replayed(original)
    assert raw["prepare_data"]["source"] == str(original.root / source)
    why = "DVC has lost it" if kept else "neither git nor DVC keeps it"
    assert f"prepare_data.source={source} is taken as it is now, since {why}" in capsys.readouterr().err


def test_a_hub_id_is_taken_at_its_commit(original: Paths) -> None:
    tiny.write_params(
        original.root, **{"prepare_data.source": "docstrings", "model.name_or_path": "owner/name"}
    )
    hub = BASE.model_copy(update={"name_or_path": "owner/name", "kind": "hub", "commit": "4" * 40})
    raw, _ = replayed(original, hub)
    assert (raw["model"]["name_or_path"], raw["model"]["revision"]) == ("owner/name", "4" * 40)
    assert raw["prepare_data"]["source"] == "docstrings"


# --- the verdict --------------------------------------------------------------------------------


def manifest(data: str, rows: str) -> DataManifest:
    split = SplitCounts(rows=1, tokens=1, target_tokens=1, longest=1)
    return DataManifest(
        source=ROWS,
        source_fingerprint=rows * 64,
        format="alpaca",
        content_hash=data * 64,
        max_length=32,
        rows_in=2,
        train=split,
        validation=split,
        truncated=0,
        length_histogram=(),
        rejected={},
    )


REGISTERED = Registered("elastane", 3, "run", "0" * 16, "c" * 64, "d" * 64, 2.0, "e" * 40)


@pytest.mark.parametrize(
    ("data", "rows", "base", "words"),
    [
        ("d", "f", "b", None),
        ("0", "0", "b", f"the rows of {ROWS} are other ones (data dddddddddddd then, 000000000000 now)"),
        (
            "0",
            "f",
            "b",
            f"the same rows of {ROWS} became other tokens (data dddddddddddd then, 000000000000 now)",
        ),
        ("d", "f", "0", "the base model holds other weights (bbbbbbbbbbbb then, 000000000000 now)"),
        (
            "0",
            "0",
            "0",
            f"the rows of {ROWS} are other ones (data dddddddddddd then, 000000000000 now) and "
            "the base model holds other weights (bbbbbbbbbbbb then, 000000000000 now)",
        ),
    ],
)
def test_other_inputs_are_named(tmp_path: Path, data: str, rows: str, base: str, words: str | None) -> None:
    kept, replay = tmp_path / "kept", Paths(tmp_path / "replay")
    manifest("d", "f").write(kept / "manifest.json")
    manifest(data, rows).write(replay.manifest)
    BASE.model_copy(update={"content_hash": base * 64}).write(replay.base_ref)
    assert _mismatch(REGISTERED, BASE, kept, replay) == words


def test_a_mismatch_is_the_verdict(tmp_path: Path) -> None:
    score = Score(loss=2.0, perplexity=7.4, target_tokens=40)
    report = ReproduceReport(
        uri="models:/elastane/3",
        version=3,
        commit="e" * 40,
        registered=EvalReport(
            run_key="0" * 16,
            content_hash="c" * 64,
            data_hash="d" * 64,
            rows=8,
            base=score,
            tuned=score,
            loss_improvement=0.0,
        ),
        replayed=None,
        registered_data="d" * 64,
        replayed_data="0" * 64,
        registered_base="b" * 64,
        replayed_base="b" * 64,
        registered_plan="single, micro-batch 4",
        replayed_plan=None,
        mismatch="the rows of rows.json are other ones",
        loss_difference=None,
        same=False,
        bit_identical=False,
    )
    lines = report.table().splitlines()
    assert lines[1].split() == ["data", "d" * 16, "0" * 16, "differs"]
    assert lines[2].endswith("equal")
    assert lines[3] == (
        "models:/elastane/3 (commit eeeeeeeeeeee) was NOT reproduced: the rows of rows.json are other ones; "
        "nothing was trained, since it would be another model"
    )
