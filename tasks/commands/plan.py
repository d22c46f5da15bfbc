"""`elastane plan`: what a recipe needs and how fast it is, on hardware that need not be here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tasks.commands.plan_question import Question, ask
from tasks.contracts import Plan, PlanReport, Resolved
from tasks.errors import UserError
from tasks.params import Params
from tasks.paths import Paths
from tasks.planner.capabilities import TRAINABLE_NOW
from tasks.planner.explain import report as plan_report
from tasks.planner.nearest import NothingFits
from tasks.planner.problem import Pins, Problem
from tasks.planner.search import search
from tasks.planner.words import settings


@dataclass(frozen=True)
class Answer:
    """The report, and beside it what a reader needs to know: the question in full, notes, what is trained today."""

    name: str
    problem: Problem
    report: PlanReport
    notes: tuple[str, ...]
    today: str

    def document(self) -> dict[str, Any]:
        """One JSON object."""
        return {
            **recipe(self.name, self.problem),
            "hardware": self.problem.hardware.model_dump(mode="json"),
            "notes": list(self.notes),
            "trained_by_this_version": trained(self.problem, self.report.chosen.plan),
            "today": self.today,
            **self.report.model_dump(mode="json", exclude={"model"}),
            "model_spec": self.report.model.model_dump(mode="json"),
        }


def recipe(name: str, problem: Problem) -> dict[str, Any]:
    """What every answer's JSON says of the question."""
    work = problem.work
    return {
        "model": name,
        "method": work.method,
        "lora_rank": None if work.method == "full" else work.lora_rank,
        "precision": work.precision,
        "sequence": work.sequence,
        "mean_row": work.mean_row,
        "global_batch": problem.batch,
        "evaluation_rows": problem.evaluation_rows,
    }


def plan(question: Question, workspace: tuple[Params, Paths] | None) -> Answer:
    """Searches everything for what was asked.

    Raises:
        NothingFits: every legal plan needs too much memory.
        UserError: an unknown model or machine, or a pin that breaks a rule.
    """
    name, problem, notes = ask(question, workspace)
    found = search(problem)
    resolved = Resolved(precision=problem.work.precision, token_budget=None)
    report = plan_report(problem, found, resolved)
    return Answer(name, problem, report, tuple(notes), _today(problem, report))


def trained(problem: Problem, plan: Plan) -> bool:
    """Whether this version of elastane trains the plan."""
    return TRAINABLE_NOW.can(plan, problem.spec, problem.work, len(problem.hardware.gpus))


def _today(problem: Problem, report: PlanReport) -> str:
    """What this version would train instead, where it cannot train the choice."""
    if trained(problem, report.chosen.plan):
        return ""
    if problem.work.method not in TRAINABLE_NOW.methods or problem.work.longest_tiles:
        what = problem.work.method if not problem.work.longest_tiles else "training with images"
        return f"{what} is planned, not yet trained by this version"
    pins = problem.pins
    free = Pins(gpus=pins.gpus, micro_batch=pins.micro_batch, accumulation=pins.accumulation)
    try:
        best = search(problem.changed(capabilities=TRAINABLE_NOW, pins=free)).fitting[0]
    except NothingFits as error:
        why = str(error).removeprefix("no plan fits: ")
        return f"of the plans that this version trains (on one machine) none fits: {why}"
    except UserError as error:
        return f"this version has no plan for it: {error}"
    speed = best.estimate.tokens_per_second if best.estimate else 0.0
    return f"this version would train it as {settings(best.plan)}, predicted {speed:,.0f} tokens/s"
