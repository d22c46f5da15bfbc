"""Errors of predictions: overall, by regime, and of fit or no fit."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.planner_accuracy.rows import Case
from tasks.planner.memory import GIB

# Goals in percent: (limit, True for at most and False for at least).
GOALS = {
    "memory_median": (5.0, True),
    "memory_p90": (12.0, True),
    "memory_source_mean": (8.0, True),
    "time_median": (10.0, True),
    "time_source_mean": (12.0, True),
    "oom_recall": (95.0, False),
    "fit_rate_of_ok": (90.0, False),
    "skipped_share": (10.0, True),
}


@dataclass(frozen=True)
class Answer:
    """One scored row: relative errors (predicted / measured - 1) or None, and whether the planner says it fits."""

    case: Case
    memory_error: float | None
    time_error: float | None
    fits: bool


def answer(case: Case) -> Answer:
    """Memory is compared with or without the CUDA context, as it was measured."""
    cost = case.cost.estimate(case.plan)
    # A card keeps some memory from the allocator, and the estimate's context is part of what is needed.
    outside = 0.0 if case.context_counts else max(0.0, 1.0 * GIB - case.cost.software.context)
    needed = cost.total_bytes + outside
    seen = cost.total_bytes - (cost.memory_bytes["fixed"] if case.allocator_only else 0)
    memory = None if case.memory is None else seen / case.memory - 1
    time = None if case.seconds is None else cost.total_seconds / case.seconds - 1
    return Answer(case, memory, time, needed <= case.cost.machine.gpu_memory)


def percent(values: Iterable[float], at: float = 0.5) -> float | None:
    """The quantile `at` of absolute errors, in percent."""
    ordered = sorted(abs(value) for value in values)
    if not ordered:
        return None
    position = at * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return round(100 * (ordered[low] + (position - low) * (ordered[high] - ordered[low])), 2)


def overall(answers: Sequence[Answer], skipped: int) -> dict[str, float | int | None]:
    memory = [each.memory_error for each in answers if each.memory_error is not None]
    time = [each.time_error for each in answers if each.time_error is not None]
    oom = [each for each in answers if each.case.status == "oom"]
    fine = [each for each in answers if each.case.status == "ok"]
    mixed = [each for each in answers if each.case.status == "oom_or_crash"]
    return {
        "memory_median": percent(memory),
        "memory_p90": percent(memory, 0.9),
        "time_median": percent(time),
        "memory_source_mean": _source_mean(answers, "memory_error"),
        "time_source_mean": _source_mean(answers, "time_error"),
        "oom_recall": _share(not each.fits for each in oom),
        "fit_rate_of_ok": _share(each.fits for each in fine),
        "oom_or_crash_unfit": _share(not each.fits for each in mixed),
        "rows_scored": len(answers),
        "rows_skipped": skipped,
    }


def _share(flags: Iterable[bool]) -> float | None:
    found = list(flags)
    return round(100 * sum(found) / len(found), 2) if found else None


def _source_mean(answers: Sequence[Answer], name: str) -> float | None:
    """The mean of the sources' medians, in percent."""
    groups: dict[str, list[float]] = defaultdict(list)
    for each in answers:
        value = getattr(each, name)
        if value is not None:
            groups[each.case.source].append(value)
    medians = [middle for middle in (percent(group) for group in groups.values()) if middle is not None]
    return round(statistics.mean(medians), 2) if medians else None


def regimes(answers: Sequence[Answer]) -> list[dict[str, object]]:
    """Errors of every (source, method, parallelism)."""
    groups: dict[tuple[str, str, str], list[Answer]] = defaultdict(list)
    for each in answers:
        groups[each.case.regime].append(each)
    return [
        {"source": source, "method": method, "parallel": parallel, **_errors(group)}
        for (source, method, parallel), group in sorted(groups.items())
    ]


def by_source(answers: Sequence[Answer]) -> list[dict[str, object]]:
    """Errors of every source."""
    groups: dict[str, list[Answer]] = defaultdict(list)
    for each in answers:
        groups[each.case.source].append(each)
    return [{"source": source, **_errors(group)} for source, group in sorted(groups.items())]


def _errors(group: Sequence[Answer]) -> dict[str, object]:
    memory = [each.memory_error for each in group if each.memory_error is not None]
    time = [each.time_error for each in group if each.time_error is not None]
    return {
        "rows": len(group),
        "memory_median": percent(memory),
        "memory_bias": _bias(memory),
        "time_median": percent(time),
        "time_bias": _bias(time),
    }


def _bias(values: Sequence[float]) -> float | None:
    return round(100 * statistics.median(values), 2) if values else None


def skipped_share(scores: Mapping[str, float | int | None]) -> float:
    """Rows that could not be asked, in percent of all."""
    skipped, scored = scores["rows_skipped"] or 0, scores["rows_scored"] or 0
    return round(100 * skipped / max(1, skipped + scored), 2)


def met(scores: Mapping[str, float | int | None]) -> dict[str, bool | None]:
    """Which goals are reached; None where nothing was measured."""
    values = {**scores, "skipped_share": skipped_share(scores)}
    return {
        name: None if values[name] is None else values[name] <= limit if most else values[name] >= limit
        for name, (limit, most) in GOALS.items()
    }
