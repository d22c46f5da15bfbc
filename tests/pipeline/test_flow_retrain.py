"""What the flow does though DVC holds all for up to date: retraining, and filling a store that was lost."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import pytest
import torch

from flows.finetune import forget_training
from tasks.contracts import TrainReport
from tasks.params import read_params
from tasks.paths import Paths
from tests.pipeline.workspace import Workspace

pytestmark = pytest.mark.timeout(500)


def test_retraining_asks_no_remote_and_gives_the_same_weights(finished: Workspace, tmp_path: Path) -> None:
    workspace = finished.copy(tmp_path / "workspace")
    workspace.must("dvc", "remote", "add", "-d", "store", str(tmp_path / "remote"))
    workspace.must("dvc", "push")
    paths = Paths(workspace.root)
    before = workspace.weights()
    key = TrainReport.read(paths.train_report).run_key
    forget_training(read_params(paths.params), paths)
    workspace.must("dvc", "repro", "--force", "--single-item", "train")
    assert (paths.run(f"{key}.old-1") / "steps.jsonl").is_file(), "the old run is kept"
    assert (paths.run(key) / "steps.jsonl").is_file(), "it was trained, not pulled"
    after = workspace.weights()
    assert after.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    assert not (paths.final / "manifest.old.json").exists()


def test_a_deleted_store_is_filled_again(finished: Workspace, tmp_path: Path) -> None:
    workspace = finished.copy(tmp_path / "workspace")
    (workspace.root / "mlflow.db").unlink()
    shutil.rmtree(workspace.root / "mlartifacts")
    done = workspace.must("elastane", "run", "--json")
    assert json.loads(done.stdout)["ran"] == ["probe_hardware", "register"]
    assert " so it is registered again" in done.stderr
    with sqlite3.connect(f"file:{workspace.root / 'mlflow.db'}?mode=ro", uri=True) as store:
        assert store.execute("select name, version from model_versions").fetchall() == [("elastane", 1)]
    again = workspace.must("elastane", "run", "--json")
    assert json.loads(again.stdout)["ran"] == ["probe_hardware"]
