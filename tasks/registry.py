"""The model registry: what stands there, and the text a reviewer decides from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.contracts import DataManifest, EvalReport, TrainPerformance, TrainReport
from tasks.errors import UserError
from tasks.params import Params, RegisterParams
from tasks.paths import Paths
from tasks.tracking_store import open_store

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

RUN_KEY, CONTENT, DATA, LOSS = (
    "elastane.run_key",
    "elastane.content_hash",
    "elastane.data_hash",
    "elastane.eval_loss",
)
COMMIT = "elastane.git_commit"
MODEL_URI = re.compile(r"models:/(?P<name>[^/@]+)(?:/(?P<number>\d+)|@(?P<alias>[^/@]+))")


@dataclass(frozen=True)
class Champion:
    """The version that carries the alias `champion`."""

    version: str
    data_hash: str | None
    loss: float | None


def find_version(client: MlflowClient, name: str, run_key: str, content_hash: str) -> ModelVersion | None:
    """The version that holds exactly these weights of this run, if it was registered before."""
    query = f"name = '{name}' and tags.`{RUN_KEY}` = '{run_key}'"
    for version in client.search_model_versions(query):
        if version.tags.get(CONTENT) == content_hash:
            return version
    return None


@dataclass(frozen=True)
class Registered:
    """A registered version, as its tags and its run tell it; `commit` is empty outside a git repository."""

    name: str
    version: int
    run_id: str
    run_key: str
    content_hash: str
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
    if run is None or not {RUN_KEY, CONTENT, LOSS} <= version.tags.keys():
        raise UserError(
            f"{uri} was not registered by elastane, so it does not say how it was made; name another"
        )
    return Registered(
        name=name,
        version=int(version.version),
        run_id=str(version.run_id),
        run_key=version.tags[RUN_KEY],
        content_hash=version.tags[CONTENT],
        loss=float(version.tags[LOSS]),
        commit=run.data.tags.get(COMMIT, ""),
    )


def find_champion(client: MlflowClient, name: str) -> Champion | None:
    from mlflow.exceptions import MlflowException

    try:
        version = client.get_model_version_by_alias(name, "champion")
    except MlflowException:
        return None
    loss = version.tags.get(LOSS)
    return Champion(str(version.version), version.tags.get(DATA), float(loss) if loss else None)


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
) -> str:
    """Markdown for the version's page in MLflow."""
    recipe = params.train
    method = f"LoRA rank {recipe.lora.rank}" if recipe.finetuning_type == "lora" else "full tuning"
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
        "- Samples beside the base's: `samples.json` in the run. Replay: `elastane reproduce models:/"
        f"{params.register_.model_name}/<version>`.",
    ]
    return "\n".join(lines)


def _champion_row(report: EvalReport, champion: Champion | None) -> list[str]:
    if champion is None:
        return ["", "There is no champion yet."]
    if champion.data_hash != report.data_hash or champion.loss is None:
        return [
            "",
            f"The champion is version {champion.version}; it was judged on other data: not comparable.",
        ]
    better = "better" if report.tuned.loss < champion.loss else "not better"
    return [f"| champion (version {champion.version}) | {champion.loss:.4f} | this model is {better} |"]


def _speed(performance: TrainPerformance | None) -> list[str]:
    if performance is None or not performance.steps_timed:
        return []
    peak = max(rank.peak_memory_bytes for rank in performance.ranks) / 2**30
    return [
        f"- Plan {performance.plan.name}, {performance.tokens_per_second:,.0f} tokens/s, "
        f"peak {peak:.1f} GiB a rank, {performance.starts} start(s)."
    ]
