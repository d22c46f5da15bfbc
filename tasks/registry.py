"""The model registry: what stands there, and the text a reviewer decides from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.certificate import Certificate, markdown
from tasks.contracts import (
    METHOD_NAMES,
    DataManifest,
    EvalReport,
    Registration,
    TrainPerformance,
    TrainReport,
)
from tasks.errors import UserError
from tasks.params import Params, RegisterParams
from tasks.paths import Paths
from tasks.stage import heartbeat
from tasks.tracking_store import StoreOutOfReach, open_store, reader, tracking_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

RUN_KEY, CONTENT, DATA, LOSS, ROWS = (
    "elastane.run_key",
    "elastane.content_hash",
    "elastane.data_hash",
    "elastane.eval_loss",
    "elastane.eval_rows",
)
COMMIT = "elastane.git_commit"
MODEL_URI = re.compile(r"models:/(?P<name>[^/@]+)(?:/(?P<number>\d+)|@(?P<alias>[^/@]+))")


@dataclass(frozen=True)
class Champion:
    """The version that carries the alias `champion`, and what its loss was taken on; None where it says nothing.

    The first `rows` held-out rows of the data are always the same ones, so data and number name them.
    """

    version: str
    data_hash: str | None
    rows: int | None
    loss: float | None

    def incomparable(self, report: EvalReport) -> str | None:
        """Why its loss says nothing beside the report's, or None."""
        if self.data_hash != report.data_hash:
            return "it was judged on other data"
        if self.loss is None or self.rows is None:
            return "it does not say on how many held-out rows it was judged; register it again"
        if self.rows != report.rows:
            return f"it was judged on {self.rows} held-out rows and this model on {report.rows} (evaluate.max_rows)"
        return None


def find_version(client: MlflowClient, name: str, run_key: str, content_hash: str) -> ModelVersion | None:
    """The version that holds exactly these weights of this run, if it was registered before."""
    query = f"name = '{name}' and tags.`{RUN_KEY}` = '{run_key}'"
    for version in client.search_model_versions(query):
        if version.tags.get(CONTENT) == content_hash:
            return version
    return None


def what_is_missing(registration: Registration, register: RegisterParams, paths: Paths) -> str | None:
    """What registration.json names and the store does not hold, in words; None when all is there.

    DVC sees files alone: a store that was deleted, or is another one now, changes none of them.

    Raises:
        StoreOutOfReach: the store does not answer.
    """
    uri = tracking_uri(register, paths)
    with heartbeat("asking MLflow for what was registered"):
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        try:
            client = reader(register, paths)
            return _missing(client, registration, uri)
        except (MlflowException, SQLAlchemyError, OSError) as error:
            raise StoreOutOfReach(uri, error) from None


def _missing(client: MlflowClient, registration: Registration, uri: str) -> str | None:
    from mlflow.exceptions import MlflowException

    what = f"the run {registration.mlflow_run_id}"
    try:
        if client.get_run(registration.mlflow_run_id).info.lifecycle_stage != "active":
            return f"{what} was deleted from {uri}"
        if registration.version is None:
            return None
        what = f"{registration.model_name} version {registration.version} of these weights"
        version = client.get_model_version(registration.model_name, str(registration.version))
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return f"{what} is not in {uri}"
    same = version.tags.get(CONTENT) == registration.content_hash
    return None if same else f"{what} is not in {uri}"


@dataclass(frozen=True)
class Registered:
    """A registered version, as its tags and its run tell it; `commit` is empty outside a git repository."""

    name: str
    version: int
    run_id: str
    run_key: str
    content_hash: str
    data_hash: str
    loss: float
    commit: str


def find_registered(register: RegisterParams, paths: Paths, uri: str) -> Registered:
    """The version that `models:/name/3` or `models:/name@alias` names.

    Raises:
        UserError: the URI has another form, or no such version, or elastane did not register it.
    """
    parts = MODEL_URI.fullmatch(uri)
    if parts is None:
        raise UserError(
            f"{uri!r} names no registered version; write models:/{register.model_name}/3 or "
            f"models:/{register.model_name}@candidate"
        )
    open_store(register, paths)
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    name, number, alias = parts["name"], parts["number"], parts["alias"]
    client = MlflowClient()
    try:
        number = number or client.get_model_version_by_alias(name, alias).version
        version = client.get_model_version(name, str(number))
        run = client.get_run(version.run_id) if version.run_id else None
    except MlflowException as error:
        known = [f"{name}/{found.version}" for found in client.search_model_versions(f"name = '{name}'")]
        raise UserError(
            f"{uri} is not in the registry ({str(error).splitlines()[0]}); "
            f"there is {', '.join(known) or 'no version of that name yet: `elastane run` registers one'}"
        ) from None
    if run is None or not {RUN_KEY, CONTENT, DATA, LOSS} <= version.tags.keys():
        raise UserError(
            f"{uri} was not registered by elastane, so it does not say how it was made; name another"
        )
    return Registered(
        name=name,
        version=int(version.version),
        run_id=str(version.run_id),
        run_key=version.tags[RUN_KEY],
        content_hash=version.tags[CONTENT],
        data_hash=version.tags[DATA],
        loss=float(version.tags[LOSS]),
        commit=run.data.tags.get(COMMIT, ""),
    )


def find_champion(client: MlflowClient, name: str) -> Champion | None:
    from mlflow.exceptions import MlflowException

    try:
        version = client.get_model_version_by_alias(name, "champion")
    except MlflowException:
        return None
    loss, rows = version.tags.get(LOSS), version.tags.get(ROWS)
    return Champion(
        version=str(version.version),
        data_hash=version.tags.get(DATA),
        rows=int(rows) if rows else None,
        loss=float(loss) if loss else None,
    )


def refusal(report: EvalReport, least: float) -> str | None:
    """Why the gate refuses, or None: the tuned model must beat its base by more than `least` nats a token."""
    if report.loss_improvement > least:
        return None
    return (
        f"not registered: held-out loss {report.tuned.loss:.4f} against the base's {report.base.loss:.4f} is an "
        f"improvement of {report.loss_improvement:.4f}, and register.min_loss_improvement={least} asks for more"
    )


def description(
    params: Params,
    report: EvalReport,
    trained: TrainReport,
    manifest: DataManifest,
    performance: TrainPerformance | None,
    champion: Champion | None,
    commit: str,
    certificate: Certificate | None,
) -> str:
    """Markdown for the version's page in MLflow."""
    recipe = params.train
    tables = " and embeddings" if recipe.lora.train_embeddings else ""
    adapted = f"{METHOD_NAMES[recipe.finetuning_type]} rank {recipe.lora.rank}{tables}"
    method = METHOD_NAMES["full"] if recipe.finetuning_type == "full" else adapted
    lines = [
        f"**{method} of {params.model.name_or_path}** on {manifest.source}: {trained.steps} steps, "
        f"{trained.tokens:,} tokens ({trained.target_tokens:,} learnt), global batch {params.global_batch}, "
        f"{trained.precision}.",
        "",
        f"| held out ({report.rows} rows, {report.tuned.target_tokens:,} tokens) | loss | perplexity |",
        "| --- | --- | --- |",
        f"| base | {report.base.loss:.4f} | {report.base.perplexity:.2f} |",
        f"| **this model** | **{report.tuned.loss:.4f}** | **{report.tuned.perplexity:.2f}** |",
        *_champion_row(report, champion),
        "",
        f"- Data: {manifest.source}, content `{manifest.content_hash[:12]}`, {manifest.train.rows} rows to train on, "
        f"{manifest.validation.rows} held out, {sum(manifest.rejected.values())} left out.",
        f"- Run `{report.run_key}`, weights `{report.content_hash[:12]}`, {commit}.",
        *_speed(performance),
        markdown(certificate),
        "- Samples beside the base's: `samples.json` in the run. Replay: `elastane reproduce models:/"
        f"{params.register_.model_name}/<version>`.",
    ]
    return "\n".join(lines)


def _champion_row(report: EvalReport, champion: Champion | None) -> list[str]:
    if champion is None:
        return ["", "There is no champion yet."]
    reason = champion.incomparable(report)
    if reason:
        return ["", f"The champion is version {champion.version}: not comparable because {reason}."]
    assert champion.loss is not None
    better = "better" if report.tuned.loss < champion.loss else "not better"
    return [f"| champion (version {champion.version}) | {champion.loss:.4f} | this model is {better} |"]


def _speed(performance: TrainPerformance | None) -> list[str]:
    if performance is None or not performance.steps_timed:
        return []
    peak = max(rank.peak_memory_bytes for rank in performance.ranks) / 2**30
    mfu = "" if performance.mfu is None else f" (MFU {performance.mfu:.0%})"
    return [
        f"- Plan {performance.plan.name}, {performance.tokens_per_second:,.0f} tokens/s{mfu}, "
        f"peak {peak:.1f} GiB a rank, {performance.starts} start(s). {performance.advice}"
    ]
