"""What Prefect shows beside a flow run: the plan, the result, the way to MLflow."""

from __future__ import annotations

import base64
import io
import re
from typing import TYPE_CHECKING

from prefect.artifacts import create_image_artifact, create_markdown_artifact, create_table_artifact

from tasks.contracts import EvalReport, PlanReport, Registration
from tasks.params import Params
from tasks.paths import Paths
from tasks.planner.explain import table

if TYPE_CHECKING:
    from tasks.commands.data import Sample

DPI = 80
ROOM = 1500  # characters of a row


def publish_data(params: Params, paths: Paths) -> None:
    """What `elastane data` shows as Prefect artifacts: a table, a picture, and rows with what is learnt between ⟦ ⟧."""
    if not paths.manifest.is_file():
        return
    from tasks.commands.data import REPORTED, look
    from tasks.commands.data_lines import shortened
    from tasks.commands.data_picture import draw
    from tasks.commands.data_table import table as lines

    view = look(params, paths, "train", None, REPORTED)
    manifest = view.manifest
    told = (
        f"{manifest.rows_in:,} rows in, {manifest.train.rows:,} to train on, {manifest.validation.rows:,} held out, "
        f"{sum(manifest.rejected.values()):,} left out"
    )
    create_table_artifact(key="data", table=lines(view), description=told)
    drawn = io.BytesIO()
    draw(view).savefig(drawn, dpi=DPI, format="png")
    # The picture itself, not its place: no server has the workspace's files.
    address = f"data:image/png;base64,{base64.b64encode(drawn.getvalue()).decode()}"
    create_image_artifact(key="data-picture", image_url=address, description=told)
    rows = [
        f"**{view.split} row {sample.row}**: {sample.tokens:,} tokens, {sample.learnt:,} learnt\n\n"
        + fenced(shortened(sample, ROOM))
        for sample in view.samples
    ]
    text = "\n\n".join(["What is learnt stands between ⟦ and ⟧.", *rows])
    create_markdown_artifact(key="data-rows", markdown=text, description=told)


def fenced(sample: Sample) -> str:
    """A row as a block of code, whatever it holds, its learnt stretches between ⟦ ⟧."""
    text = "".join(f"⟦{span.text}⟧" if span.learnt else span.text for span in sample.spans)
    ticks = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, ticks + 1)
    return f"{fence}\n{text}\n{fence}"


def publish_plan(paths: Paths) -> None:
    """The planner's table as a Prefect artifact."""
    report = PlanReport.read(paths.plan)
    create_markdown_artifact(key="plan", markdown=f"```\n{table(report)}\n```", description=report.why)


def publish_result(paths: Paths) -> None:
    """Losses and the registered version as a Prefect artifact."""
    report, registration = EvalReport.read(paths.eval_report), Registration.read(paths.registration)
    lines = [
        "| held out | loss | perplexity |",
        "| --- | --- | --- |",
        f"| base | {report.base.loss:.4f} | {report.base.perplexity:.2f} |",
        f"| tuned | {report.tuned.loss:.4f} | {report.tuned.perplexity:.2f} |",
        "",
        f"{registration.reason} (MLflow run `{registration.mlflow_run_id}`)",
    ]
    create_markdown_artifact(key="result", markdown="\n".join(lines), description=registration.reason)
