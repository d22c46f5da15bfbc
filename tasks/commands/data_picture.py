"""`elastane data` as a picture: lengths, sources, what was left out, and rows with their learnt tokens marked."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.commands.data import DataView
from tasks.commands.data_lines import Line, families, lines_of
from tasks.contracts import DataManifest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 110
WIDTH = 13.0  # inches
TOP = 3.9  # inches of the three panels
SIZE, LEADING = 8.5, 1.5  # points of a letter, letters of a line
CHAR = 0.63 * SIZE  # points: the most that a letter of DejaVu Sans Mono takes, brought to whole pixels
MARGIN = 0.35  # inches
COLUMNS = int(72 * (WIDTH - 2 * MARGIN) / CHAR)
SHOWN = 6  # bars of a panel
LEARNT, READ, BEHIND = "#0b5d1e", "#555555", "#d6f0da"
BAR = "#4c78a8"


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    told: str


def write_picture(view: DataView, path: Path) -> None:
    """Writes a PNG.

    Raises:
        UserError: the file cannot be written.
    """
    from tasks.errors import UserError

    try:
        draw(view).savefig(path, dpi=DPI, format="png")
    except OSError as error:
        raise UserError(f"--picture {path} cannot be written ({error.strerror}); name another file") from None


def draw(view: DataView) -> Figure:
    """Three panels (rows by length, tokens by source, rows left out by reason) above the samples."""
    from matplotlib.figure import Figure

    manifest = view.manifest
    lines = lines_of(view, COLUMNS)
    below = (len(lines) + 1) * LEADING * SIZE / 72 + MARGIN
    figure = Figure(figsize=(WIDTH, TOP + below))
    grid = figure.add_gridspec(2, 1, height_ratios=[TOP, below])
    above, under = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
    panels = above.subplots(1, 3)
    above.subplots_adjust(left=0.06, right=0.98, top=1 - 0.95 / TOP, bottom=0.75 / TOP, wspace=0.16)
    above.suptitle(_title(manifest), x=MARGIN / WIDTH, y=1 - 0.2 / TOP, ha="left", fontsize=11)
    _lengths(panels[0], manifest)
    _bars(panels[1], "tokens by source", _sources(manifest), "")
    left_out = sum(manifest.rejected.values())
    _bars(panels[2], f"rows left out: {left_out:,}", _left_out(manifest), "none")
    text = under.add_axes((0, 0, 1, 1))
    text.set_axis_off()
    for number, line in enumerate(lines):
        _write(text, line, (0.5 + number) * LEADING * SIZE)
    return figure


def _title(manifest: DataManifest) -> str:
    packed = manifest.packed
    packs = f", packed into {packed.packs:,}, {packed.fill:.1%} full" if packed else ""
    several = len(manifest.sources) > 1
    name = f"{len(manifest.sources)} sources" if several else _short(manifest.source, 60)
    return (
        f"{name}: {manifest.rows_in:,} rows in, {manifest.train.rows:,} to train on "
        f"({manifest.train.tokens:,} tokens{packs}), {manifest.validation.rows:,} held out"
    )


def _lengths(axes: Axes, manifest: DataManifest) -> None:
    bins = manifest.length_histogram
    size = 8.0 if len(bins) < 8 else 7.0 if len(bins) < 12 else 6.5
    drawn = axes.bar(range(len(bins)), [one.rows for one in bins], width=0.9, color=BAR)
    axes.bar_label(drawn, [_count(one.rows) for one in bins], fontsize=size, padding=1)
    axes.set_xticks(range(len(bins)), [_power(one.upper) for one in bins], fontsize=size)
    axes.margins(y=0.12)
    axes.yaxis.set_major_formatter(lambda value, _: _count(value))
    axes.tick_params(axis="y", labelsize=8)
    axes.set_title("rows by length", fontsize=10, loc="left")
    cut = f"; {manifest.truncated:,} were longer and are cut" if manifest.truncated else ""
    axes.set_xlabel(f"tokens, up to (at most {manifest.max_length:,}{cut})", fontsize=8)
    axes.set_ylabel("rows", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _sources(manifest: DataManifest) -> list[Bar]:
    total = max(1, sum(source.tokens for source in manifest.sources))
    return [
        Bar(_short(source.name, 44), source.tokens, f"{_count(source.tokens)} ({source.tokens / total:.0%})")
        for source in sorted(manifest.sources, key=lambda source: -source.tokens)
    ]


def _left_out(manifest: DataManifest) -> list[Bar]:
    reasons = sorted(manifest.rejected.items(), key=lambda item: -item[1])
    return [Bar(reason, count, f"{count:,} ({count / manifest.rows_in:.1%})") for reason, count in reasons]


def _bars(axes: Axes, title: str, bars: Sequence[Bar], nothing: str) -> None:
    """Horizontal bars, each below its name, so that long names have the panel's whole width."""
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_axis_off()
    if not bars:
        axes.text(0, 0.9, nothing, transform=axes.transAxes, fontsize=9, color=READ, va="top")
        return
    shown = list(bars[:SHOWN])
    if rest := bars[SHOWN:]:
        more = sum(bar.value for bar in rest)
        shown[-1:] = [Bar(f"{len(rest) + 1} others", shown[-1].value + more, _count(shown[-1].value + more))]
    longest = max(1.0, *(bar.value for bar in shown))
    for place, bar in enumerate(shown):
        axes.barh(place, bar.value, height=0.34, color=BAR)
        axes.text(bar.value + 0.015 * longest, place, bar.told, va="center", fontsize=8, parse_math=False)
        name = textwrap.shorten(bar.name, 62, placeholder=" …")
        axes.text(0, place - 0.24, name, va="bottom", fontsize=8, parse_math=False)
    axes.set_xlim(0, 1.4 * longest)
    axes.set_ylim(max(len(shown), 4) - 0.6, -0.7)  # few bars stay as thin as many


def _write(axes: Axes, line: Line, below: float) -> None:
    """A line of text, `below` points under the upper edge: each run begins where the one before it is seen to end."""
    before: Any = None
    for run in line.runs:
        before = axes.annotate(
            run.text,
            (1, 1) if before else (0, 1),
            (0 if before else 72 * MARGIN, -below),
            xycoords=(before or "axes fraction", "axes fraction"),
            textcoords="offset points",
            family=families(),
            fontsize=SIZE,
            fontweight="bold" if line.heading else "normal",
            va="center",
            color=LEARNT if run.learnt else "black" if line.heading else READ,
            bbox={"facecolor": BEHIND, "edgecolor": "none", "pad": 0.7} if run.learnt else None,
            parse_math=False,
            annotation_clip=False,
        )


def _count(value: float) -> str:
    """A number in at most five characters or so: 999, 12.3k, 4.5M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            scaled = value / (1e3 if letter == "k" else size)
            return f"{scaled:.3g}{letter}" if scaled < 1000 else f"{scaled:,.0f}{letter}"
    return f"{value:,.0f}"


def _power(upper: int) -> str:
    """A power of two as contexts are called: 512, 4K."""
    return f"{upper >> 10}K" if upper >= 1 << 10 else str(upper)


def _short(text: str, length: int) -> str:
    """Without its middle, where it is longer."""
    if len(text) <= length:
        return text
    head = (length - 1) // 2
    return f"{text[:head]}…{text[len(text) - (length - 1 - head) :]}"
