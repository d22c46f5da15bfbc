"""The table at the end of a run."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.table import Table

from flows.embedded import users_server
from tasks.contracts import EvalReport, PlanReport, Registration, Samples, TrainPerformance, TrainReport
from tasks.params import Params
from tasks.paths import Paths
from tasks.tracking_store import tracking_uri


class Summary(BaseModel):
    """Everything the table says; `elastane run --json` prints it."""

    model_config = ConfigDict(frozen=True)

    ran: tuple[str, ...]
    evaluation: EvalReport
    samples: Samples
    training: TrainReport
    performance: TrainPerformance
    plan: PlanReport
    registration: Registration
    open_mlflow: str
    open_prefect: str


def summarize(params: Params, paths: Paths, ran: tuple[str, ...]) -> Summary:
    """Reads the reports of a finished run."""
    return Summary(
        ran=ran,
        evaluation=EvalReport.read(paths.eval_report),
        samples=Samples.read(paths.samples),
        training=TrainReport.read(paths.train_report),
        performance=TrainPerformance.read(paths.train_performance),
        plan=PlanReport.read(paths.plan),
        registration=Registration.read(paths.registration),
        open_mlflow=_mlflow_command(params, paths),
        open_prefect=_prefect_command(paths),
    )


def _program(name: str) -> str:
    """A program of this environment as one can type it in the workspace."""
    path = Path(sys.executable).parent / name
    try:
        return shlex.quote(str(path.relative_to(Path.cwd())))
    except ValueError:
        return shlex.quote(str(path))


def _mlflow_command(params: Params, paths: Paths) -> str:
    uri = tracking_uri(params.register_, paths)
    if uri.startswith("http"):
        return f"{uri} in a browser"
    if uri == f"sqlite:///{paths.mlflow_db}":
        uri = "sqlite:///mlflow.db"
    return f"{_program('mlflow')} ui --backend-store-uri {shlex.quote(uri)}   # then http://127.0.0.1:5000"


def _prefect_command(paths: Paths) -> str:
    if users_server():
        from prefect.settings import PREFECT_UI_URL

        return f"{PREFECT_UI_URL.value()} in a browser"
    home = os.environ.get("PREFECT_HOME", str(paths.prefect_home))
    shown = "$PWD/runs/prefect" if home == str(paths.prefect_home) else shlex.quote(home)
    return f"PREFECT_HOME={shown} {_program('prefect')} server start   # then http://127.0.0.1:4200"


def show(summary: Summary, console: Console) -> None:
    """Prints the table."""
    report, performance, training = summary.evaluation, summary.performance, summary.training
    facts = Table(title="Result", show_header=False, title_justify="left")
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    base, tuned = report.base, report.tuned
    facts.add_row(
        "eval loss", f"{base.loss:.4f} before, {tuned.loss:.4f} after ({report.rows} held-out rows)"
    )
    facts.add_row("perplexity", f"{base.perplexity:.2f} before, {tuned.perplexity:.2f} after")
    facts.add_row("trained", f"{training.steps} steps, {training.tokens:,} tokens, {training.precision}")
    if performance.steps_timed:
        peak = max(rank.peak_memory_bytes for rank in performance.ranks) / 2**30
        facts.add_row(
            "speed", f"{performance.tokens_per_second:,.0f} tokens/s, peak memory {peak:.1f} GiB a rank"
        )
    facts.add_row("plan", f"{performance.plan.name}, micro-batch {performance.plan.micro_batch}")
    facts.add_row("why", summary.plan.why)
    facts.add_row("advice", performance.advice)
    facts.add_row("model", summary.registration.reason)
    facts.add_row("ran now", ", ".join(summary.ran) or "nothing: all was up to date")
    console.print(facts)
    if summary.samples.samples:
        console.print(_samples(summary.samples))
    if summary.samples.note:
        console.print(summary.samples.note, highlight=False)
    console.print("Look at the model:", style="bold")
    console.print(f"  {summary.open_mlflow}", soft_wrap=True, highlight=False)
    console.print("Look at the flow:", style="bold")
    console.print(f"  {summary.open_prefect}", soft_wrap=True, highlight=False)


def _samples(samples: Samples) -> Table:
    table = Table(title="Answers on held-out questions", title_justify="left", show_lines=True)
    for column in ("question", "base", "tuned", "reference"):
        table.add_column(column, overflow="fold", ratio=1)
    for sample in samples.samples:
        table.add_row(sample.prompt, sample.base, sample.tuned, sample.reference)
    return table
