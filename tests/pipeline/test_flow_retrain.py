"""What the flow does though DVC holds all for up to date: retraining, and filling a store that was lost."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import pytest
import torch

from flows.finetune import _register_again, forget_training
from tasks.contracts import Registration, TrainReport
from tasks.params import read_params
from tasks.paths import Paths
from tasks.tracking_store import StoreOutOfReach
from tests import tiny
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


@pytest.mark.parametrize(
    ("missing", "again"),
    [
        (None, False),
        ("the run r is not in sqlite:///x", True),
        (StoreOutOfReach("x", OSError("refused")), False),
    ],
    ids=["nothing", "lost", "out of reach"],
)
def test_register_runs_again_where_the_store_has_lost_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    missing: str | Exception | None,
    again: bool,
) -> None:
    """What is missing is told by tests/pipeline/test_register.py; here, what the flow makes of it."""
    paths = Paths(tmp_path)
    tiny.write_params(tmp_path)
    facts = {"run_key": "k", "content_hash": "c", "mlflow_run_id": "r", "model_name": "elastane"}
    Registration(**facts, version=1, alias="candidate", reason="registered").write(paths.registration)

    def look(registration: Registration, *_: object) -> str | None:
        assert registration.mlflow_run_id == "r"
        if isinstance(missing, Exception):
            raise missing
        return missing

    ran: list[tuple[object, ...]] = []
    monkeypatch.setattr("flows.finetune.what_is_missing", look)
    monkeypatch.setattr("flows.finetune.run_stage", lambda *given, force: ran.append((*given, force)) or True)
    assert _register_again(paths) is again
    assert ran == ([(paths.root, "register", True)] if again else [])
    assert bool(capsys.readouterr().err) is (missing is not None), "it is said"


# Quick: the test above, test_register.py::test_what_the_store_has_lost_is_named, and
# test_pipeline.py::test_an_unchanged_repro_runs_only_the_probe_and_fast.
@pytest.mark.slow
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
