"""What Prefect shows beside a flow run: the plan, the result, the way to MLflow."""

from __future__ import annotations

from prefect.artifacts import create_markdown_artifact

from tasks.contracts import EvalReport, PlanReport, Registration
from tasks.paths import Paths
from tasks.planner.explain import table


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
