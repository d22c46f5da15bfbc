"""The planner asked the other way round: which hardware for a recipe, which model and row for hardware."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tasks.commands.plan import recipe, trained
from tasks.commands.plan_question import Question, ask, check, images_of
from tasks.contracts import Candidate, ModelSpec
from tasks.errors import UserError
from tasks.params import Params
from tasks.paths import Paths
from tasks.planner.capabilities import EVERYTHING
from tasks.planner.hardware_names import BESIDE, named_hardware
from tasks.planner.known_models import KNOWN
from tasks.planner.model_spec import model_spec
from tasks.planner.nearest import NothingFits, first_fit
from tasks.planner.problem import Problem
from tasks.planner.search import legal_layouts, search
from tasks.planner.space import RuledOut
from tasks.planner.words import gib, settings
from tasks.planner.workload import Method
from tasks.select_strategy import natural_precision

KINDS = ("RTX4090", "L40S", "A100-40G", "A100-80G", "H100", "H200", "B200")
COUNTS = ("1x{}", "2x{}", "4x{}", "8x{}", "8x{} x 2 nodes", "8x{} x 4 nodes", "8x{} x 8 nodes")
METHODS: tuple[Method, ...] = ("qlora", "lora", "full")
LONGEST = 2**20
STEP = 64  # tokens to which the longest row is found
STAND_IN = "llama-3.1-405b"  # whose recipe is taken where no model is named: it refuses the fewest
# One card and a disk can train almost anything, at a few tokens a second: no answer to these questions.
WITHOUT_DISK = replace(EVERYTHING, disk=False)
NOTHING = "nothing fits"


@dataclass(frozen=True)
class Line:
    """One answer: what, and the best plan for it, or why there is none."""

    what: str
    best: Candidate | None = None
    trained: bool = False
    why: str = NOTHING
    note: str = ""

    def document(self) -> dict[str, Any]:
        plan = None if self.best is None else self.best.model_dump(mode="json")
        why = None if self.best is not None else self.why
        return {
            "what": self.what,
            "best": plan,
            "trained_by_this_version": self.trained,
            "why_not": why,
            "note": self.note,
        }

    def text(self, width: int) -> str:
        """One line, with `width` columns for what was asked."""
        if self.best is None or self.best.estimate is None:
            return f"{self.what:{width}} {self.why}"
        cost = self.best.estimate
        mark = "" if self.trained else "  (planned, not yet trained by this version)"
        return (
            f"{self.what:{width}} {cost.tokens_per_second:10,.0f} tokens/s  {gib(cost.peak_bytes):>6} of "
            f"{gib(cost.memory_limit_bytes)} GiB  {settings(self.best.plan)}{mark}"
            + (f"; {self.note}" if self.note else "")
        )


@dataclass(frozen=True)
class Inverse:
    """Lines, and the question in full. Without `name` no model was asked about, without `machine` no hardware."""

    name: str
    problem: Problem
    notes: tuple[str, ...]
    lines: tuple[Line, ...]
    machine: bool
    methods: tuple[Method, ...]

    def document(self) -> dict[str, Any]:
        """One JSON object."""
        hardware = self.problem.hardware.model_dump(mode="json") if self.machine else None
        return {
            **recipe(self.name, self.problem),
            "methods": list(self.methods),
            "hardware": hardware,
            "notes": list(self.notes),
            "answers": [line.document() for line in self.lines],
        }


def what_hardware(question: Question, workspace: tuple[Params, Paths] | None) -> Inverse:
    """Of each kind of a short list the smallest machine that fits the recipe, with its best plan.

    Raises:
        UserError: see plan.
    """
    here = "1xA100-80G"
    name, problem, notes = ask(replace(question, hardware=here), workspace)
    assumed = set(named_hardware(here).notes)
    notes = [note for note in notes if note not in assumed]
    (gaming, few), (centre, cores) = BESIDE[True], BESIDE[False]
    notes.append("no offload to disks")
    notes.append(
        f"hosts assumed: {gaming} GiB and {few} cores a GeForce, {centre} GiB and {cores} cores any other GPU; between "
        "nodes the network usual for the kind"
    )

    def line(kind: str) -> Line:
        found = Line(kind)
        for words in COUNTS:
            hardware = named_hardware(words.format(kind))
            work = replace(problem.work, precision=question.precision or natural_precision(hardware))
            asked = problem.changed(hardware=hardware, work=work, capabilities=WITHOUT_DISK)
            fabric = f", {hardware.fabric.name}" if hardware.fabric else ""
            found = _line(asked, words.format(kind) + fabric)
            if found.best is not None:
                return found
        return replace(found, what=f"up to {found.what}")

    lines = tuple(_group(map(line, KINDS)))
    return Inverse(name, problem, tuple(notes), lines, False, (problem.work.method,))


def largest(question: Question, workspace: tuple[Params, Paths] | None) -> Inverse:
    """The largest known model a method, and the longest row of the model asked for.

    Raises:
        UserError: see plan.
    """
    methods = METHODS if question.method is None else (question.method,)
    named = question.model is not None or (workspace is not None and workspace[1].manifest.is_file())
    asked = question if named else replace(question, model=STAND_IN)
    name, problem, notes = ask(replace(asked, method=question.method or "lora"), workspace)
    problem = problem.changed(capabilities=WITHOUT_DISK)
    notes = [
        *(note for note in notes if named or "the model was made for" not in note),
        "no offload to disks",
    ]
    lines: list[Line] = []
    if named:
        least = images_of(question, problem.spec)[0] if question.model is not None else 0
        found = (
            _longest(_with_method(problem, method), f"{method}: longest row of {name}", least)
            for method in methods
        )
        lines += _group(found)
    plain = problem.changed(work=replace(problem.work, tiles=0.0, longest_tiles=0))
    specs = {name: model_spec(config) for name, config in KNOWN.items()}
    lines += _group(_largest_model(_with_method(plain, method), method, specs) for method in methods)
    return Inverse(name if named else "", problem, tuple(notes), tuple(lines), True, methods)


def _group(lines: Iterator[Line]) -> list[Line]:
    """All lines of one question.

    Raises:
        UserError: none has a legal plan, so the rule that stands against the last is the answer.
    """
    found = list(lines)
    if all(line.best is None and line.why != NOTHING for line in found):
        raise UserError(found[-1].why)
    return found


def _with_method(problem: Problem, method: Method) -> Problem:
    return problem.changed(work=replace(problem.work, method=method))


def _largest_model(problem: Problem, method: str, specs: dict[str, ModelSpec]) -> Line:
    """The known model with most parameters that fits; larger ones that a rule forbids are said."""
    refused: list[str] = []
    too_large = 0
    for name in sorted(specs, key=lambda name: -specs[name].parameters):
        asked = problem.changed(spec=specs[name])
        if specs[name].vision is not None:
            continue
        try:
            if _fits(asked):
                found = _line(asked, f"{method}: largest model, {name}")
                return replace(
                    found, note=f"{len(refused)} larger ones are refused, as {refused[0]}" if refused else ""
                )
            too_large += 1
        except UserError as error:
            refused.append(str(error))
    what = f"{method}: largest model"
    return Line(what) if too_large or not refused else Line(what, why=refused[0])


def _longest(problem: Problem, what: str, least: int) -> Line:
    """The longest row, a multiple of STEP tokens within the model's positions that holds its images' `least` tokens."""

    def fits(steps: int) -> bool:
        return _fits(_rows(problem, steps * STEP))

    most = (problem.spec.max_positions or LONGEST) // STEP
    try:
        best = _last(fits, -(-least // STEP) or 1, most)
    except UserError as error:
        return Line(what, why=str(error))
    if best == 0:
        return Line(what)
    end = " (its own limit)" if best == most else ""
    return _line(_rows(problem, best * STEP), f"{what}, {best * STEP} tokens{end}")


def _last(fits: Callable[[int], bool], first: int, most: int) -> int:
    """The largest number from `first` to `most` that fits, by doubling and then halving what is open; 0 if none."""
    if first > most or not fits(first):
        return 0
    low, high = first, first * 2
    while high <= most and fits(high):
        low, high = high, high * 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _rows(problem: Problem, sequence: int) -> Problem:
    return problem.changed(work=replace(problem.work, sequence=sequence, mean_row=sequence))


def _fits(problem: Problem) -> bool:
    """Whether some plan fits.

    Raises:
        UserError: the recipe or a pin breaks a rule.
    """
    check(problem)
    legal_layouts(problem, RuledOut())
    return first_fit(problem) is not None


def _line(problem: Problem, what: str) -> Line:
    try:
        if not _fits(problem):  # far quicker than a search that looks for ways out
            return Line(what)
        best = search(problem).fitting[0]
    except NothingFits:
        return Line(what)
    except UserError as error:
        return Line(what, why=str(error))
    return Line(what, best, trained(problem, best.plan))
