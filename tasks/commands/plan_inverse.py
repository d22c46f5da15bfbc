"""The planner asked the other way round: which hardware for a recipe, which model and row for hardware."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tasks.commands.plan import Question, ask, trained
from tasks.contracts import Candidate
from tasks.errors import UserError
from tasks.params import Params
from tasks.paths import Paths
from tasks.planner.capabilities import EVERYTHING
from tasks.planner.hardware_names import named_hardware
from tasks.planner.known_models import KNOWN
from tasks.planner.model_spec import model_spec
from tasks.planner.nearest import first_fit
from tasks.planner.problem import Problem
from tasks.planner.search import search
from tasks.planner.words import gib, settings
from tasks.select_strategy import natural_precision

KINDS = ("RTX4090", "L40S", "A100-40G", "A100-80G", "H100", "H200", "B200")
COUNTS = ("1x{}", "2x{}", "4x{}", "8x{}", "8x{} x 2 nodes", "8x{} x 4 nodes", "8x{} x 8 nodes")
METHODS = ("qlora", "lora", "full")
LONGEST = 2**20
WITHOUT_DISK = replace(EVERYTHING, disk=False)


@dataclass(frozen=True)
class Line:
    """One answer: what, and the best plan for it (None where nothing fits)."""

    what: str
    best: Candidate | None
    trained: bool

    def document(self) -> dict[str, Any]:
        plan = None if self.best is None else self.best.model_dump(mode="json")
        return {"what": self.what, "best": plan, "trained_by_this_version": self.trained}

    def text(self) -> str:
        if self.best is None or self.best.estimate is None:
            return f"{self.what:34} nothing fits"
        cost = self.best.estimate
        mark = "" if self.trained else "  (planned, not yet trained by this version)"
        return (
            f"{self.what:34} {cost.tokens_per_second:10,.0f} tokens/s  {gib(cost.peak_bytes):>6} of "
            f"{gib(cost.memory_limit_bytes)} GiB  {settings(self.best.plan)}{mark}"
        )


def what_hardware(question: Question, workspace: tuple[Params, Paths] | None) -> list[Line]:
    """Of each kind of a short list the smallest machine that fits the recipe, with its best plan.

    Raises:
        UserError: see plan.
    """
    _, problem, _ = ask(replace(question, hardware="1xA100-80G"), workspace)
    lines = []
    for kind in KINDS:
        for words in COUNTS:
            text = words.format(kind)
            hardware = named_hardware(text)
            work = replace(problem.work, precision=question.precision or natural_precision(hardware))
            # One card and a disk can train anything, at a few tokens a second: no answer to this question.
            line = _line(problem.changed(hardware=hardware, work=work, capabilities=WITHOUT_DISK), text)
            if line.best is not None:
                break
        else:
            line = Line(f"up to {text}", None, False)
        lines.append(line)
    return lines


def largest(question: Question, workspace: tuple[Params, Paths] | None) -> list[Line]:
    """The largest known model a method, and the longest row of the model asked for.

    Raises:
        UserError: see plan.
    """
    lines = []
    if question.model is not None or (workspace is not None and workspace[1].manifest.is_file()):
        name, problem, _ = ask(question, workspace)
        lines += [
            _longest(_with_method(problem, method), f"{method}: longest row of {name}") for method in METHODS
        ]
    specs = {name: model_spec(config) for name, config in KNOWN.items()}
    ranked = sorted(specs, key=lambda name: -specs[name].parameters)
    base = ask(replace(question, model="smollm2-135m", image_size=None), None)[1]
    for method in METHODS:
        for name in ranked:
            asked = _with_method(base, method).changed(spec=specs[name])
            if specs[name].vision is None and _fits(asked):
                lines.append(_line(asked, f"{method}: largest model, {name}"))
                break
        else:
            lines.append(Line(f"{method}: largest model", None, False))
    return lines


def _with_method(problem: Problem, method: str) -> Problem:
    return problem.changed(work=replace(problem.work, method=method))


def _longest(problem: Problem, what: str) -> Line:
    """Doubles rows from 256 tokens until they do not fit or the model's positions end."""
    most = problem.spec.max_positions or LONGEST
    sequence, best = 256, None
    while sequence <= most and _fits(_rows(problem, sequence)):
        best, sequence = sequence, sequence * 2
    if best is None:
        return Line(what, None, False)
    end = " (its own limit)" if sequence > most else ""
    return _line(_rows(problem, best), f"{what}, {best} tokens{end}")


def _rows(problem: Problem, sequence: int) -> Problem:
    return problem.changed(work=replace(problem.work, sequence=sequence, mean_row=sequence))


def _fits(problem: Problem) -> bool:
    try:
        return first_fit(problem) is not None
    except UserError:
        return False


def _line(problem: Problem, what: str) -> Line:
    try:
        best = search(problem).fitting[0]
    except UserError:
        return Line(what, None, False)
    return Line(what, best, trained(problem, best.plan))
