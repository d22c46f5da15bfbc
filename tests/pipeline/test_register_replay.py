"""A version made from uncommitted code is replayed from its commit and the diff that was kept with it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tasks.commands.reproduce import ReproduceReport
from tasks.contracts import Registration
from tests import tiny
from tests.pipeline.workspace import Workspace

pytestmark = [pytest.mark.timeout(500), pytest.mark.slow]


def test_uncommitted_changes_are_replayed(finished: Workspace, tmp_path: Path) -> None:
    workspace = finished.copy(tmp_path / "workspace")
    code = workspace.root / "tasks" / "run_key.py"
    changed = code.read_text().replace("NUMERICS_VERSION = 1", "NUMERICS_VERSION = 77")
    assert changed != code.read_text()
    code.write_text(changed)
    workspace.change(**{"train.num_train_epochs": 1})
    workspace.must("dvc", "repro")
    registered = Registration.read(workspace.root / "reports" / "registration.json")
    assert registered.version == 2
    # What lies here now must not matter.
    code.write_text(changed.replace("77", "78"))
    workspace.change(**{"train.num_train_epochs": 2})
    tiny.write_rows(workspace.root / "data" / "raw" / "rows.json", seed=9)
    workspace.must("dvc", "add", "-q", "data/raw/rows.json")
    done = workspace.must("elastane", "reproduce", "--json", "models:/elastane@candidate")
    report = ReproduceReport.model_validate_json(done.stdout)
    assert report.same
    assert report.bit_identical
    assert report.replayed.run_key == registered.run_key


def test_other_rows_are_named_before_anything_is_trained(finished: Workspace, tmp_path: Path) -> None:
    workspace = finished.copy(tmp_path / "workspace")
    tiny.write_rows(workspace.root / "data" / "raw" / "rows.json", seed=9)
    shutil.rmtree(workspace.root / ".dvc" / "cache")
    done = workspace.run("elastane", "reproduce", "models:/elastane/1")
    assert done.returncode == 1
    assert "taken as it is now, since DVC has lost it" in done.stderr
    assert "was NOT reproduced: the rows of " in done.stdout.splitlines()[-1]
    assert "── train (replay)" not in done.stderr


def test_a_commit_that_is_gone_is_named(finished: Workspace, tmp_path: Path) -> None:
    workspace = finished.copy(tmp_path / "workspace")
    identity = ("-c", "user.name=t", "-c", "user.email=t@t")
    workspace.must("git", *identity, "commit", "-q", "--amend", "--allow-empty", "-m", "another")
    workspace.must("git", "reflog", "expire", "--expire=now", "--all")
    workspace.must("git", "gc", "-q", "--prune=now")
    done = workspace.run("elastane", "reproduce", "models:/elastane/1")
    assert done.returncode == 2
    assert "which this repository lacks; run `git fetch --all`" in done.stderr
