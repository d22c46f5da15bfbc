"""Stage register: everything about the run into MLflow, and the model into its registry if it passes the gate."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tasks.certificate import certificate_file, find_certificate, tag_version
from tasks.commands.plan_picture import draw
from tasks.contracts import (
    DataManifest,
    EvalReport,
    PlanReport,
    Registration,
    Samples,
    TrainPerformance,
    TrainReport,
)
from tasks.git_state import GitState, git_state
from tasks.params import Params
from tasks.paths import Paths
from tasks.planner.explain import table
from tasks.registry import (
    COMMIT,
    CONTENT,
    DATA,
    LOSS,
    ROWS,
    RUN_KEY,
    description,
    find_champion,
    find_version,
    refusal,
)
from tasks.run_key import recipe
from tasks.stage import heartbeat, say, stage_main
from tasks.tracking_store import find_run, open_store

ALIAS = "candidate"
SAMPLES_TABLE, DATA_TABLE = "samples_table.json", "data_table.json"


def register(params: Params, paths: Paths) -> Registration:
    """Logs the run, registers the version (once for the same weights) and writes registration.json.

    Raises:
        UserError: the MLflow store is out of reach.
    """
    report = EvalReport.read(paths.eval_report)
    experiment = open_store(params.register_, paths)
    import mlflow

    known = find_run(experiment, report.run_key)
    name = f"{params.train.finetuning_type}-{report.run_key[:8]}"
    with (
        mlflow.start_run(
            run_id=known, run_name=None if known else name, tags={RUN_KEY: report.run_key}
        ) as run,
        heartbeat("logging reports and the model"),
    ):
        state = git_state(paths.root)
        if known is None:
            _log_curves(paths)
        _log_reports(params, paths, report, state)
        registration = _register(params, paths, report, state, run.info.run_id)
    registration.write(paths.registration)
    say(f"register: {registration.reason}")
    return registration


def _register(params: Params, paths: Paths, report: EvalReport, state: GitState, run_id: str) -> Registration:
    import mlflow

    client = mlflow.MlflowClient()
    name = params.register_.model_name
    facts = {
        "run_key": report.run_key,
        "content_hash": report.content_hash,
        "mlflow_run_id": run_id,
        "model_name": name,
    }
    refused = refusal(report, params.register_.min_loss_improvement)
    if refused:
        client.set_tag(run_id, "elastane.gate", refused)
        return Registration(**facts, version=None, alias=None, reason=refused)
    present = find_version(client, name, report.run_key, report.content_hash)
    if present is None:
        version = _log_model(paths, name)
        reason = f"registered as {name} version {version}, alias {ALIAS}"
    else:
        version = str(present.version)
        reason = f"these weights already are {name} version {version}, alias {ALIAS}"
    tags = {
        RUN_KEY: report.run_key,
        CONTENT: report.content_hash,
        DATA: report.data_hash,
        LOSS: repr(report.tuned.loss),
        ROWS: str(report.rows),
    }
    for key, value in tags.items():
        client.set_model_version_tag(name, version, key, value)
    certificate = find_certificate(paths, report.run_key)
    tag_version(client, name, version, certificate)
    text = description(
        params,
        report,
        TrainReport.read(paths.train_report),
        DataManifest.read(paths.manifest),
        _measured(paths, report.run_key),
        find_champion(client, name),
        state.described,
        certificate,
    )
    client.update_model_version(name, version, description=text)
    client.set_registered_model_alias(name, ALIAS, version)
    return Registration(**facts, version=int(version), alias=ALIAS, reason=reason)


def _log_model(paths: Paths, name: str) -> str:
    """Logs an MLflow model that loads and answers, registers it and returns the version."""
    import mlflow

    from tasks.commands import served_model

    info = mlflow.pyfunc.log_model(
        name="model",
        loader_module=served_model.__name__,
        data_path=str(paths.final),
        pip_requirements=[f"{name}=={version(name)}" for name in ("torch", "transformers", "peft")],
        registered_model_name=name,
        input_example=None,
    )
    return str(info.registered_model_version)


def _measured(paths: Paths, run_key: str) -> TrainPerformance | None:
    """Speed of this very run, where it was measured on this machine."""
    if not paths.train_performance.is_file():
        return None
    performance = TrainPerformance.read(paths.train_performance)
    return performance if performance.run_key == run_key else None


def _log_reports(params: Params, paths: Paths, report: EvalReport, state: GitState) -> None:
    import mlflow

    # MLflow's params never change, so only what the RunKey covers can be one; the rest is in params.yaml.
    mlflow.log_params(_flat(recipe(params)))
    mlflow.set_tags(
        {"elastane.model": params.model.name_or_path, "elastane.source": params.prepare_data.source}
    )
    mlflow.log_metrics(
        {
            "base_loss": report.base.loss,
            "base_perplexity": report.base.perplexity,
            "tuned_loss": report.tuned.loss,
            "tuned_perplexity": report.tuned.perplexity,
            "loss_improvement": report.loss_improvement,
        }
    )
    files = [paths.params, paths.root / "dvc.yaml", paths.root / "dvc.lock", paths.manifest, paths.plan]
    files += [paths.hardware, paths.eval_report, paths.train_report, paths.train_performance, paths.samples]
    files.append(paths.run(report.run_key) / "resolved.json")
    if find_certificate(paths, report.run_key):
        files.append(certificate_file(paths))
    for file in files:
        if file.is_file():
            mlflow.log_artifact(str(file))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "git.diff").write_bytes(state.diff)
        mlflow.log_artifact(f"{folder}/git.diff")
    mlflow.set_tags({COMMIT: state.commit or "", "elastane.data_hash": report.data_hash})
    if paths.plan.is_file():
        plan = PlanReport.read(paths.plan)
        mlflow.set_tags({"elastane.plan": plan.chosen.plan.name, "elastane.plan_why": plan.why})
        mlflow.log_text(table(plan), "plan.txt")
        mlflow.log_figure(draw(plan, params.model.name_or_path), "plan.png")
    _log_samples(Samples.read(paths.samples))
    _log_data(params, paths)


def _log_data(params: Params, paths: Paths) -> None:
    """What `elastane data` shows, as a picture, a table and a page; nothing where data/prepared was not fetched."""
    import mlflow

    if not (paths.prepared / "train.arrow").is_file():
        return
    from rich.console import Console

    from tasks.commands.data import REPORTED, look
    from tasks.commands.data_picture import draw as picture
    from tasks.commands.data_table import COLUMNS
    from tasks.commands.data_table import table as lines
    from tasks.commands.data_text import show

    view = look(params, paths, "train", None, REPORTED)
    mlflow.log_figure(picture(view), "data.png")
    _log_table(DATA_TABLE, COLUMNS, [[line[column] for column in COLUMNS] for line in lines(view)])
    page = Console(record=True, width=120, file=io.StringIO())
    show(view, page)
    mlflow.log_text(page.export_html(), "data.html")


def _log_samples(samples: Samples) -> None:
    columns = ("prompt", "reference", "base", "tuned")
    _log_table(
        SAMPLES_TABLE, columns, [[getattr(sample, name) for name in columns] for sample in samples.samples]
    )


def _log_table(file: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """As MLflow's tables are, which its pages show and compare over runs."""
    import mlflow

    active = mlflow.active_run()
    assert active is not None
    there = {file.path for file in mlflow.MlflowClient().list_artifacts(active.info.run_id)}
    if file in there:
        # `log_table` would append to the table of an earlier run of this stage.
        mlflow.log_dict({"columns": list(columns), "data": list(rows)}, file)
    elif rows:
        mlflow.log_table(dict(zip(columns, map(list, zip(*rows, strict=True)), strict=True)), file)


def _log_curves(paths: Paths) -> None:
    """For a run that was trained where this store was out of reach: its curves, from the report."""
    import csv
    import time

    import mlflow
    from mlflow.entities import Metric

    if not paths.curves.is_file():
        return
    now = int(time.time() * 1000)
    with paths.curves.open(encoding="utf-8") as file:
        points = [
            Metric({"loss": "train_loss"}.get(name, name), float(value), now, int(row["step"]))
            for row in csv.DictReader(file)
            for name, value in row.items()
            if name != "step"
        ]
    active = mlflow.active_run()
    assert active is not None
    for start in range(0, len(points), 900):
        mlflow.MlflowClient().log_batch(active.info.run_id, metrics=points[start : start + 900])


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested sections as dotted keys, as params.yaml says them."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value if isinstance(value, str) else json.dumps(value)
    return flat


def main() -> None:
    stage_main("register", register)


if __name__ == "__main__":
    main()
