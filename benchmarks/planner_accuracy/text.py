"""The report as a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.planner_accuracy.score import GOALS, met, skipped_share

ERRORS = ("rows", "memory_median", "memory_bias", "time_median", "time_bias")
HEADS = ("rows", "memory", "bias", "time", "bias")


def as_text(report: Mapping[str, Any]) -> str:
    """Errors in percent by regime, the whole beside the goals, and why rows were skipped."""
    parts = [
        "Median errors and biases in percent (predicted / measured - 1), by source, method and parallelism",
        table(
            ("source", "method", "parallel", *HEADS),
            [[row[key] for key in ("source", "method", "parallel", *ERRORS)] for row in report["regimes"]],
            texts=3,
        ),
        goals_text(report),
        "Rows skipped",
        table(("reason", "rows"), [list(pair) for pair in report["skipped"].items()]),
    ]
    return "\n\n".join(parts)


def goals_text(report: Mapping[str, Any]) -> str:
    """Every way of scoring beside the goals."""
    columns: dict[str, Mapping[str, Any]] = {"all rows": report["overall"]}
    for way, found in report.get("held_out", {}).items():
        columns[way.replace("_", " ")] = found["overall"]
    columns["baselines"] = report["baselines"]["overall"]
    verdicts = met(report["overall"])
    rows = []
    for name, (limit, most) in GOALS.items():
        values = [
            skipped_share(scores) if name == "skipped_share" else scores[name] for scores in columns.values()
        ]
        goal = f"{'<=' if most else '>='} {limit:g}"
        verdict = {True: "met", False: "missed", None: "-"}[verdicts[name]]
        rows.append([name.replace("_", " "), goal, verdict, *values])
    return table(("percent", "goal", "verdict", *columns), rows, texts=3)


def table(heads: Sequence[str], rows: Sequence[Sequence[object]], texts: int = 1) -> str:
    """Columns as wide as their widest entry; the first `texts` to the left, numbers to the right."""
    lines = [list(heads), *([_entry(value) for value in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    return "\n".join(
        "  ".join(
            entry.ljust(width) if column < texts else entry.rjust(width)
            for column, (entry, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _entry(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else str(value)
