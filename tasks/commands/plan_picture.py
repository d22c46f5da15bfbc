"""The best plans as a picture: memory by term against the limit, a step's time by term."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.contracts import Candidate, PlanReport
from tasks.planner.explain import cost_of, distinct

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GIB = 2**30
SHOWN = 6
FAINT = 0.01  # terms below this share of the longest bar are summed up as "other"


def write_picture(report: PlanReport, path: Path, title: str = "") -> None:
    """Writes a PNG.

    Raises:
        UserError: the file cannot be written.
    """
    from tasks.errors import UserError

    try:
        draw(report, title).savefig(path, dpi=110, format="png")
    except OSError as error:
        raise UserError(f"--picture {path} cannot be written ({error.strerror}); name another file") from None


def draw(report: PlanReport, title: str = "") -> Figure:
    """Two panels of stacked bars, a bar a plan."""
    from matplotlib.figure import Figure

    plans = distinct((report.chosen, *report.runners_up))[:SHOWN]
    figure = Figure(figsize=(13, 1.9 + 0.62 * len(plans)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _stack(left, plans, lambda c: {name: size / GIB for name, size in cost_of(c).memory_bytes.items()})
    limit = cost_of(plans[0]).memory_limit_bytes / GIB
    left.axvline(limit, color="black", linestyle="--", linewidth=1.5, label=f"limit {limit:.1f}")
    left.set_xlabel("GiB of the fullest GPU" if plans[0].plan.device == "cuda" else "GiB of a process")
    left.set_title("memory")
    _stack(right, plans, lambda c: cost_of(c).seconds)
    right.set_xlabel("seconds a step")
    right.set_title("time")
    for index, candidate in enumerate(plans):
        cost = cost_of(candidate)
        right.text(
            cost.total_seconds, index, f" {cost.tokens_per_second:,.0f} tokens/s", va="center", fontsize=9
        )
    right.set_xlim(right=1.25 * max(cost_of(c).total_seconds for c in plans))
    left.set_yticks(range(len(plans)), [_label(candidate) for candidate in plans])
    left.get_yticklabels()[0].set_fontweight("bold")
    left.invert_yaxis()
    for axes in (left, right):
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16 - 0.25 / len(plans)), ncols=4)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{title}  (the choice in bold)".strip())
    return figure


def _label(candidate: Candidate) -> str:
    plan = candidate.plan
    level = {"none": "", "selective": ", selective", "full": ", recomputing"}[plan.activation_checkpointing]
    schedule = f", {plan.schedule}" if plan.pp > 1 else ""
    compiled = ", compiled" if plan.compiled else ""
    return f"{plan.name}\nmicro {plan.micro_batch} x {plan.accumulation}{level}{schedule}{compiled}"


def _stack(axes: Axes, plans: list[Candidate], terms_of: Callable[[Candidate], dict[str, Any]]) -> None:
    values = [terms_of(candidate) for candidate in plans]
    longest = max(sum(terms.values()) for terms in values)
    names = dict.fromkeys(name for terms in values for name in terms)
    shown = [name for name in names if max(terms.get(name, 0.0) for terms in values) >= FAINT * longest]
    starts = [0.0] * len(plans)
    rows = [(name, [terms.get(name, 0.0) for terms in values]) for name in shown]
    rest = [sum(value for name, value in terms.items() if name not in shown) for terms in values]
    for index, (name, sizes) in enumerate([*rows, ("other", rest)]):
        if any(sizes):
            color = "lightgray" if name == "other" else f"C{index % 10}" if index < 10 else "olive"
            axes.barh(
                range(len(plans)), sizes, left=starts, label=name.replace("_", " "), color=color, height=0.6
            )
            starts = [start + size for start, size in zip(starts, sizes, strict=True)]
