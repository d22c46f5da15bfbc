"""The choice in words and as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tasks.contracts import Candidate, CostEstimate, PlanReport, Resolved
from tasks.planner.advice import advice
from tasks.planner.gpus import gpu_type
from tasks.planner.problem import COMPILE_SECONDS, Problem
from tasks.planner.search import HOPELESS, NEAR_TIE, Found
from tasks.planner.words import gib, seconds, settings

SHOWN = 5
BAR = 40
NAME = 14  # columns of a plan's name, at least
CAPTION = (
    f"the best of each other layout, fastest first; within {NEAR_TIE - 1:.0%} the simpler plan comes first"
)


def report(problem: Problem, found: Found, resolved: Resolved) -> PlanReport:
    """plan.json's content."""
    return PlanReport(
        chosen=found.fitting[0],
        why=why(problem, found),
        runners_up=tuple(found.fitting[1:]),
        rejected=(*found.rejected, *found.ruled_out),
        resolved=resolved,
        model=problem.spec,
        advice=tuple(advice(problem, found.fitting[0])),
        fit=found.fit,
        unfit=found.unfit,
        hopeless=found.hopeless,
    )


def why(problem: Problem, found: Found) -> str:
    """Plain words for the choice."""
    hardware = problem.hardware
    chosen, others = found.fitting[0], distinct(found.fitting)[1:]
    plan, cost = chosen.plan, cost_of(chosen)
    host = f" and {gib(sum(cost.host_bytes.values()))} of {gib(cost.host_limit_bytes)} GiB host memory a node"
    beside = "" if plan.offload == "none" else host
    parts = [
        f"{settings(plan)}: predicted {cost.tokens_per_second:,.0f} tokens/s with {gib(cost.total_bytes)} of "
        f"{gib(cost.memory_limit_bytes)} GiB a process{beside}, best of {found.fit} plans that fit"
        + (f" ({found.unfit} need too much memory)." if found.unfit else ".")
    ]
    if others:
        mine, its = (problem.step_seconds(each.plan, cost_of(each)) for each in (chosen, others[0]))
        slower = its / mine - 1
        speed = (
            f"{slower:.0%} slower" if slower > NEAR_TIE - 1 else "about as fast, but larger or less simple"
        )
        parts.append(f"Next is {settings(others[0].plan)}, {speed}.")
    if plan.compiled and problem.steps is not None and problem.pins.compiled is None:
        plain = problem.cost.estimate(plan.model_copy(update={"compiled": False}))
        saved = (plain.total_seconds - cost.total_seconds) * problem.steps
        parts.append(
            f"Compiling takes about {COMPILE_SECONDS:.0f} s and saves {saved:,.0f} s over {problem.steps:,} steps."
        )
    if plan.device == "cpu" and plan.world_size == 1:
        parts.append(f"On a CPU one process already uses all {hardware.cpu_cores} cores.")
    idle = hardware.gpu_count - plan.world_size
    if plan.device == "cuda" and idle:
        parts.append(
            f"{idle} of {hardware.gpu_count} GPUs stay idle: the degree must divide global_batch={plan.global_batch} "
            "and pay for its communication."
        )
    names = guessed(problem)
    if names:
        parts.append(f"The speed of {', '.join(names)} is guessed from its compute capability.")
    return " ".join(parts)


def guessed(problem: Problem) -> list[str]:
    """Names of cards that no row of the table knows."""
    names = {gpu.name: gpu.compute_capability for gpu in problem.hardware.gpus}
    return [name for name, capability in names.items() if not gpu_type(name, capability)[1]]


def distinct(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The first candidate of every layout."""
    seen: dict[tuple[str, str], Candidate] = {}
    for candidate in candidates:
        seen.setdefault((candidate.plan.name, candidate.plan.schedule), candidate)
    return list(seen.values())


def table(report: PlanReport) -> str:
    """The choice, its memory and time by term, the runners-up, the rejected and advice, as lines of text."""
    cost, others = cost_of(report.chosen), runners_up(report)[:SHOWN]
    costed = [candidate for candidate in report.rejected if candidate.estimate is not None]
    width = name_width([report.chosen, *others, *costed[:SHOWN]])
    lines = [
        f"Plan: {report.why}",
        f"Precision {report.resolved.precision}, token budget {report.resolved.token_budget or 'none'}, "
        f"model {report.model.parameters / 1e6:,.1f} M parameters ({report.model.family})",
        "Memory, GiB: " + _terms(cost.memory_bytes, gib) + f" = {gib(cost.total_bytes)} of "
        f"{gib(cost.memory_limit_bytes)}; at a save {gib(cost.save_bytes)}, in evaluation {gib(cost.evaluation_bytes)}",
        "Step: " + _terms(cost.seconds, seconds) + f" = {seconds(cost.total_seconds)}",
        "",
        heading("", width),
        row("chosen", report.chosen, width),
        f"{'':9} {CAPTION}:",
    ]
    lines += [row("", candidate, width) for candidate in others]
    lines += [f"{'':9} {sentence}" for sentence in counts(report, "plan.json")]
    for candidate in costed[:SHOWN]:
        lines += [row("rejected", candidate, width), f"{'':9} {candidate.rejected}"]
    lines += [
        f"ruled out {candidate.rejected}" for candidate in report.rejected if candidate.estimate is None
    ]
    return "\n".join([*lines, *(f"advice    {sentence}" for sentence in report.advice)])


def bars(terms: Mapping[str, float], whole: float, show: Callable[[float], str]) -> list[str]:
    """One line a term, as long as its share of `whole`."""
    shown = sorted(((name, value) for name, value in terms.items() if value), key=lambda item: -item[1])
    return [
        f"  {name:16} {show(value):>8}  {'█' * max(1, round(BAR * value / whole)) if whole else ''}"
        for name, value in shown
    ]


def cost_of(candidate: Candidate) -> CostEstimate:
    assert candidate.estimate is not None, "search costs every plan that breaks no rule"
    return candidate.estimate


def runners_up(report: PlanReport) -> list[Candidate]:
    """The best of every other layout, in the order of the ranking."""
    return [other for other in distinct((report.chosen, *report.runners_up)) if other is not report.chosen]


def counts(report: PlanReport, where: str) -> list[str]:
    """What the table leaves out: how many plans fit, need too much memory, or were not costed, and what `where` has."""
    kept = 1 + len(report.runners_up)
    best = f"the best {kept} are" if kept < report.fit else "all are"
    found = [f"{report.fit} plans fit, {best} in {where}"]
    if report.unfit:
        found.append(
            f"{report.unfit} need too much memory (the smallest micro-batch of a layout and level stands for the "
            f"larger), all in {where}"
        )
    if report.hopeless:
        found.append(
            f"{report.hopeless} layouts were not costed: even at the data sheet's peak they take over {HOPELESS:g} "
            "times the best plan's step"
        )
    return found


def name_width(candidates: Sequence[Candidate]) -> int:
    """Columns that hold the names of the plans."""
    return max(NAME, *(len(candidate.plan.name) for candidate in candidates))


def heading(label: str, width: int) -> str:
    """Over the rows of `row`."""
    return f"{label:9} {'plan':{width}} {'micro':>5} {'accum':>5} {'checkpointing':13} {'GiB':>7} {'tokens/s':>12}"


def row(label: str, candidate: Candidate, width: int) -> str:
    plan, cost = candidate.plan, cost_of(candidate)
    return (
        f"{label:9} {plan.name:{width}} {plan.micro_batch:5} {plan.accumulation:5} {plan.activation_checkpointing:13} "
        f"{gib(cost.peak_bytes):>7} {cost.tokens_per_second:12,.0f}" + ("  compiled" if plan.compiled else "")
    )


def _terms(terms: Mapping[str, float], show: Callable[[float], str]) -> str:
    return " + ".join(f"{name} {show(value)}" for name, value in terms.items() if value)
