"""The choice in words and as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tasks.contracts import Candidate, CostEstimate, HardwareProfile, Plan, PlanReport
from tasks.planner.memory import GIB
from tasks.planner.time import guessed

SHOWN = 5


def gib(number: float) -> str:
    """Bytes in GiB, with one decimal (two below 0.1 GiB)."""
    return f"{number / GIB:.1f}" if number >= 0.1 * GIB else f"{number / GIB:.2f}"


def settings(plan: Plan) -> str:
    return (
        f"{plan.name}, micro-batch {plan.micro_batch} x accumulation {plan.accumulation}, "
        f"activation_checkpointing={plan.activation_checkpointing}"
    )


def largest_terms(cost: CostEstimate) -> str:
    terms = sorted(cost.memory_bytes.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {gib(number)}" for name, number in terms)


def too_large(plan: Plan, cost: CostEstimate, fitting: Sequence[Plan]) -> str:
    """Which terms, by how much, and the plan nearest to this one that fits."""

    def distance(other: Plan) -> tuple[bool, bool, int]:
        return (
            other.dp_replicate != plan.dp_replicate,
            other.activation_checkpointing != plan.activation_checkpointing,
            abs(other.micro_batch - plan.micro_batch),
        )

    return (
        f"needs {gib(cost.total_bytes)} GiB of {gib(cost.memory_limit_bytes)} GiB, "
        f"{gib(cost.total_bytes - cost.memory_limit_bytes)} GiB too much ({largest_terms(cost)}); "
        f"fits as {settings(min(fitting, key=distance))}"
    )


def why(candidates: Sequence[Candidate], hardware: HardwareProfile) -> str:
    """Plain words for the first of `search`'s candidates."""
    fitting = [candidate for candidate in candidates if candidate.rejected is None]
    chosen, others = fitting[0], fitting[1:]
    plan, cost = chosen.plan, _cost(chosen)
    unfit = len(candidates) - len(fitting)
    parts = [
        f"{settings(plan)}: predicted {cost.tokens_per_second:,.0f} tokens/s with {gib(cost.total_bytes)} of "
        f"{gib(cost.memory_limit_bytes)} GiB a process, best of {len(fitting)} plans that fit"
        + (f" ({unfit} need too much memory)." if unfit else ".")
    ]
    if others:
        slower = cost.tokens_per_second / _cost(others[0]).tokens_per_second - 1
        speed = f"{slower:.0%} slower" if slower > 0.02 else "about as fast, but larger or less simple"
        parts.append(f"Next is {settings(others[0].plan)}, {speed}.")
    if plan.device == "cpu" and plan.world_size == 1:
        parts.append(f"On a CPU one process already uses all {hardware.cpu_cores} cores.")
    idle = len(hardware.gpus) - plan.world_size
    if plan.device == "cuda" and idle:
        parts.append(
            f"{idle} of {len(hardware.gpus)} GPUs stay idle: the degree must divide global_batch={plan.global_batch} "
            "and pay for its communication."
        )
    names = guessed(hardware.gpus)
    if names:
        parts.append(f"The speed of {', '.join(names)} is guessed from its compute capability.")
    return " ".join(parts)


def table(report: PlanReport) -> str:
    """The choice, its memory and time by term, the runners-up and the rejected, as lines of text."""
    cost = _cost(report.chosen)
    lines = [
        f"Plan: {report.why}",
        f"Precision {report.resolved.precision}, token budget {report.resolved.token_budget or 'none'}, "
        f"model {report.model.parameters / 1e6:,.1f} M parameters ({report.model.family})",
        "Memory, GiB: " + _terms(cost.memory_bytes, gib) + f" = {gib(cost.total_bytes)} of "
        f"{gib(cost.memory_limit_bytes)}",
        "Step, s: " + _terms(cost.seconds, lambda value: f"{value:.3g}") + f" = {cost.total_seconds:.3g}",
        "",
        f"{'':9} {'plan':8} {'micro':>5} {'accum':>5} {'checkpointing':13} {'GiB':>7} {'tokens/s':>10}",
        _row("chosen", report.chosen),
    ]
    lines += [_row("", candidate) for candidate in report.runners_up[:SHOWN]]
    lines += _more(len(report.runners_up), "that fit")
    for candidate in report.rejected[:SHOWN]:
        lines += [_row("rejected", candidate), f"{'':9} {candidate.rejected}"]
    lines += _more(len(report.rejected), "rejected")
    return "\n".join(lines)


def _cost(candidate: Candidate) -> CostEstimate:
    assert candidate.estimate is not None, "search costs every candidate"
    return candidate.estimate


def _terms(terms: Mapping[str, float], show: Callable[[float], str]) -> str:
    return " + ".join(f"{name} {show(value)}" for name, value in terms.items() if value)


def _row(label: str, candidate: Candidate) -> str:
    plan, cost = candidate.plan, _cost(candidate)
    return (
        f"{label:9} {plan.name:8} {plan.micro_batch:5} {plan.accumulation:5} {plan.activation_checkpointing:13} "
        f"{gib(cost.total_bytes):>7} {cost.tokens_per_second:10,.0f}"
    )


def _more(count: int, what: str) -> list[str]:
    return [f"{'':9} and {count - SHOWN} more {what}, all in plan.json"] if count > SHOWN else []
