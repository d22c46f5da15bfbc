"""Prepared rows as lines of letters of one width, for a picture: what is learnt, what is only read."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from tasks.commands.data import DataView, Sample, Span

LINES = 14  # of a sample
UNKNOWN = "\u25a1"
OF_THE_EAST = re.compile(r"CJK|WenQuanYi|Droid Sans Fallback|Unifont|SimHei|PingFang|Hiragino Sans GB|Malgun")
KEPT = 40  # characters of a long stretch's beginning and end that are always shown


@dataclass(frozen=True)
class Run:
    """Letters of a line that are all learnt, or none of them."""

    text: str
    learnt: bool


@dataclass(frozen=True)
class Line:
    runs: tuple[Run, ...]
    heading: bool = False


def lines_of(view: DataView, columns: int) -> list[Line]:
    """The samples, each below a heading; of long ones the middle of their stretches is left out."""
    lines: list[Line] = []
    drawable = _drawable()
    for sample in view.samples:
        title = f"{view.split} row {sample.row}: {sample.tokens:,} tokens, {sample.learnt:,} learnt"
        lines += [Line(()), Line((Run(title, False),), heading=True)]
        found = list(_lines(shortened(sample, LINES * columns), columns, drawable))
        lines += found[:LINES]
        if len(found) > LINES:
            lines.append(Line((Run(f"… and {len(found) - LINES} lines more", False),)))
    told = "Marked green is learnt, grey is only read."
    if any(UNKNOWN in run.text for line in lines for run in line.runs):
        told += f" {UNKNOWN} stands for what no font of this machine has."
    return [Line((Run(told, False),)), *lines]


def shortened(sample: Sample, room: int) -> Sample:
    """The sample in about `room` characters: of stretches that are longer than their share beginning and end."""
    share = max(2 * KEPT, room // max(1, len(sample.spans)))
    if sum(len(span.text) for span in sample.spans) <= room:
        return sample
    return replace(sample, spans=tuple(_middle_left_out(span, share) for span in sample.spans))


def _middle_left_out(span: Span, share: int) -> Span:
    left_out = len(span.text) - share
    if left_out <= 2 * KEPT:
        return span
    head = share // 2
    tail = share - head
    return replace(
        span, text=f"{span.text[:head]} … {left_out:,} characters … {span.text[len(span.text) - tail :]}"
    )


def _lines(sample: Sample, columns: int, drawable: Callable[[str], bool]) -> Iterator[Line]:
    """Lines of at most so many columns, of which wide letters take two."""
    runs: list[Run] = []
    column = 0
    for span in sample.spans:
        text = ""
        for char in _plain(span.text, drawable):
            width = 0 if unicodedata.combining(char) else 1 + (unicodedata.east_asian_width(char) in "WF")
            if char == "\n" or column + width > columns:
                yield Line(_with(runs, text, span.learnt))
                runs, text, column = [], "", 0
            if char != "\n":
                text, column = text + char, column + width
        runs = list(_with(runs, text, span.learnt))
    if runs:
        yield Line(tuple(runs))


def _with(runs: list[Run], text: str, learnt: bool) -> tuple[Run, ...]:
    return (*runs, Run(text, learnt)) if text else tuple(runs)


def _plain(text: str, drawable: Callable[[str], bool]) -> Iterator[str]:
    for char in text.replace("\r\n", "\n").replace("\t", "    "):
        yield char if char == "\n" or drawable(char) else UNKNOWN


@cache
def families() -> list[str]:
    """The font of pictures, and those of this machine that have what it lacks: Chinese, Japanese, Korean."""
    from matplotlib import font_manager

    names = sorted({font.name for font in font_manager.fontManager.ttflist})
    return ["DejaVu Sans Mono", *(name for name in names if OF_THE_EAST.search(name))]


def _drawable() -> Callable[[str], bool]:
    """Whether one of the fonts has a letter for a character."""
    from matplotlib import font_manager, ft2font

    fonts = [ft2font.FT2Font(font_manager.findfont(name)) for name in families()]

    @cache
    def known(char: str) -> bool:
        return char.isprintable() and any(font.get_char_index(ord(char)) for font in fonts)

    return known
