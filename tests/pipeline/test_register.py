"""The register stage on reports made by hand, against a real MLflow store in SQLite."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest

from tasks.contracts import (
    BaseModelRef,
    DataManifest,
    EvalReport,
    FinalManifest,
    Registration,
    Sample,
    Samples,
    Score,
    SplitCounts,
    TrainReport,
)
from tasks.errors import UserError
from tasks.paths import Paths
from tasks.register import register
from tasks.registry import what_is_missing
from tasks.tracking_store import StoreOutOfReach
from tests import tiny

KEY, DATA = "0123456789abcdef", "d" * 64


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's tables, made once: that takes it ten seconds."""
    store = tmp_path_factory.mktemp("store") / "mlflow.db"
    code = f"import mlflow; mlflow.MlflowClient('sqlite:///{store}').search_experiments()"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    return store


@pytest.fixture
def paths(empty_store: Path, tmp_path: Path) -> Iterator[Paths]:
    """A workspace with a store, whose model was trained and evaluated."""
    environment = dict(os.environ)
    paths = Paths(tmp_path)
    tiny.write_params(tmp_path)
    shutil.copyfile(empty_store, paths.mlflow_db)
    split = SplitCounts(rows=10, tokens=100, target_tokens=50, longest=20)
    DataManifest(
        source="rows.json",
        source_fingerprint="f" * 64,
        format="alpaca",
        content_hash=DATA,
        max_length=32,
        rows_in=21,
        train=split,
        validation=split,
        truncated=0,
        length_histogram=(),
        rejected={"no answer": 1},
    ).write(paths.manifest)
    samples = (Sample(prompt="why?", reference="so", base="hm", tuned="so"),)
    Samples(run_key=KEY, samples=samples).write(paths.samples)
    paths.curves.write_text("step,loss,grad_norm,learning_rate\n1,3.5,1.0,0.1\n2,2.5,0.9,0.1\n")
    trained(paths)
    yield paths
    # MLflow leaves the store it used last in the environment, which is where the next one would look.
    os.environ.clear()
    os.environ.update(environment)


def trained(paths: Paths, tuned: float = 2.0, content: str = "c" * 64, key: str = KEY) -> None:
    """What train and evaluate leave behind."""
    base = BaseModelRef(
        name_or_path="tiny",
        revision=None,
        kind="folder",
        weights="source",
        content_hash="b" * 64,
        source_hash="b" * 64,
        trust_remote_code=False,
    )
    final = FinalManifest(run_key=key, content_hash=content, finetuning_type="lora", base=base)
    final.write(paths.final / "manifest.json")
    TrainReport(
        run_key=key,
        content_hash=content,
        precision="float32",
        steps=2,
        samples_seen=32,
        tokens=320,
        target_tokens=160,
        first_loss=3.5,
        final_loss=2.5,
        trainable_parameters=10,
        total_parameters=100,
    ).write(paths.train_report)
    EvalReport(
        run_key=key,
        content_hash=content,
        data_hash=DATA,
        rows=8,
        base=Score(loss=3.0, perplexity=20.1, target_tokens=40),
        tuned=Score(loss=tuned, perplexity=7.4, target_tokens=40),
        loss_improvement=3.0 - tuned,
    ).write(paths.eval_report)


def registered(paths: Paths, **changes: Any) -> Registration:
    result = register(tiny.params(**changes), paths)
    assert Registration.read(paths.registration) == result
    return result


def client() -> mlflow.MlflowClient:
    return mlflow.MlflowClient()


def test_a_version_carries_what_a_reviewer_needs(paths: Paths) -> None:
    result = registered(paths)
    assert (result.version, result.alias) == (1, "candidate")
    version = client().get_model_version_by_alias("elastane", "candidate")
    assert version.tags["elastane.run_key"] == KEY
    assert version.tags["elastane.data_hash"] == DATA
    assert float(version.tags["elastane.eval_loss"]) == 2.0
    for words in (
        "3.0000",
        "2.0000",
        DATA[:12],
        "10 held out",
        "outside a git repository",
        "no champion yet",
    ):
        assert words in version.description, words
    run = client().get_run(result.mlflow_run_id)
    assert run.data.metrics["tuned_loss"] == 2.0
    assert run.data.params["learning_rate"] == "0.001"
    curve = client().get_metric_history(result.mlflow_run_id, "train_loss")
    assert [(point.step, point.value) for point in curve] == [(1, 3.5), (2, 2.5)]
    names = {file.path for file in client().list_artifacts(result.mlflow_run_id)}
    assert {"params.yaml", "git.diff", "manifest.json", "samples_table.json"} <= names


def test_the_same_weights_are_registered_once(paths: Paths) -> None:
    first = registered(paths)
    again = registered(paths)
    assert (again.version, again.mlflow_run_id) == (1, first.mlflow_run_id)
    trained(paths, content="e" * 64)
    assert registered(paths).version == 2


def test_registering_again_with_another_threshold_keeps_the_run(paths: Paths) -> None:
    """The recipe is the same, so the MLflow run is; its parameters must not stop the stage."""
    first = registered(paths)
    changes = {"register.min_loss_improvement": 0.5, "evaluate.max_rows": 8}
    tiny.write_params(paths.root, **changes)
    again = registered(paths, **changes)
    assert again.mlflow_run_id == first.mlflow_run_id
    table = client().download_artifacts(first.mlflow_run_id, "samples_table.json")
    assert len(json.loads(Path(table).read_text())["data"]) == 1, "not appended to"
    kept = client().download_artifacts(first.mlflow_run_id, "params.yaml")
    assert Path(kept).read_bytes() == paths.params.read_bytes()


@pytest.mark.parametrize(("tuned", "least"), [(3.1, 0.0), (3.0, 0.0), (2.5, 0.5)])
def test_the_gate_asks_for_more_than_the_threshold(paths: Paths, tuned: float, least: float) -> None:
    trained(paths, tuned=tuned)
    result = registered(paths, **{"register.min_loss_improvement": least})
    assert (result.version, result.alias) == (None, None)
    assert result.reason.startswith("not registered: ")
    assert not client().search_model_versions("name = 'elastane'")
    run = client().get_run(result.mlflow_run_id)
    assert run.data.metrics["tuned_loss"] == tuned, "logged all the same"
    assert run.data.tags["elastane.gate"] == result.reason


def test_a_champion_is_compared_only_on_the_same_data(paths: Paths) -> None:
    registered(paths)
    client().set_registered_model_alias("elastane", "champion", "1")
    trained(paths, tuned=1.5, content="e" * 64, key="f" * 16)
    assert registered(paths).version == 2
    text = client().get_model_version("elastane", "2").description
    assert "champion (version 1)" in text
    assert "this model is better" in text
    client().set_model_version_tag("elastane", "1", "elastane.data_hash", "0" * 64)
    registered(paths)
    text = client().get_model_version("elastane", "2").description
    assert "champion is version 1: not comparable because it was judged on other data." in text
    assert "this model is" not in text


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ("60", r"it was judged on 60 held-out rows and this model on 8 \(evaluate\.max_rows\)\."),
        (None, r"it does not say on how many held-out rows it was judged; register it again\."),
    ],
)
def test_a_champion_judged_on_other_rows_is_not_compared(paths: Paths, rows: str | None, reason: str) -> None:
    registered(paths)
    client().set_registered_model_alias("elastane", "champion", "1")
    assert client().get_model_version("elastane", "1").tags["elastane.eval_rows"] == "8"
    if rows is None:
        client().delete_model_version_tag("elastane", "1", "elastane.eval_rows")
    else:
        client().set_model_version_tag("elastane", "1", "elastane.eval_rows", rows)
    trained(paths, tuned=1.5, content="e" * 64, key="f" * 16)
    registered(paths)
    text = client().get_model_version("elastane", "2").description
    assert re.search(f"champion is version 1: not comparable because {reason}", text), text
    assert "this model is" not in text


# --- the store ----------------------------------------------------------------------------------


def lost(paths: Paths, result: Registration, **changes: Any) -> str | None:
    return what_is_missing(result, tiny.params(**changes).register_, paths)


def test_what_the_store_has_lost_is_named(paths: Paths, empty_store: Path) -> None:
    result = registered(paths)
    assert lost(paths, result) is None
    other = shutil.copyfile(empty_store, paths.root / "other.db")
    elsewhere = {"register.tracking_uri": f"sqlite:///{other}"}
    assert lost(paths, result, **elsewhere) == f"the run {result.mlflow_run_id} is not in sqlite:///{other}"
    of_these_weights = f"elastane version 1 of these weights is not in sqlite:///{paths.mlflow_db}"
    client().set_model_version_tag("elastane", "1", "elastane.content_hash", "0" * 64)
    assert lost(paths, result) == of_these_weights
    client().delete_model_version("elastane", "1")
    assert lost(paths, result) == of_these_weights
    client().delete_run(result.mlflow_run_id)
    assert (
        lost(paths, result) == f"the run {result.mlflow_run_id} was deleted from sqlite:///{paths.mlflow_db}"
    )


def test_a_refused_model_is_missing_only_with_its_run(paths: Paths) -> None:
    trained(paths, tuned=3.1)
    result = registered(paths)
    assert lost(paths, result) is None
    client().delete_run(result.mlflow_run_id)
    assert lost(paths, result) is not None


def test_a_silent_store_is_no_lost_version(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(StoreOutOfReach, match="cannot be used"):
        lost(paths, registered(paths), **{"register.tracking_uri": closed_port()})


def closed_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def test_a_store_out_of_reach_is_named_before_anything_is_written(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    uri = closed_port()
    with pytest.raises(UserError, match=f"the MLflow store {uri} cannot be used"):
        registered(paths, **{"register.tracking_uri": uri})
    assert not paths.registration.exists()


def test_nothing_goes_to_another_store(paths: Paths, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """params.yaml says where, before the environment."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/elsewhere.db")
    registered(paths, **{"register.tracking_uri": f"sqlite:///{paths.mlflow_db}"})
    assert not (tmp_path / "elsewhere.db").exists()
    with sqlite3.connect(paths.mlflow_db) as store:
        assert store.execute("select count(*) from model_versions").fetchone() == (1,)
