"""Rows of text files: JSON or text by the line, and CSV."""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from tasks.data.json_values import decode
from tasks.data.rows import BadRow, quoted
from tasks.errors import UserError

BLOCK = 1 << 20
# A cell may be long; without any bound, a quote that is never closed would take in the rest of the file.
LONGEST_CELL = 1 << 28
SEPARATORS = ",;\t|"

Numbered = tuple[int, Any]


def line_cuts(address: str, size: int, target: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, number of the first line) of pieces of about `target` bytes that hold whole lines."""
    with open(address, "rb", buffering=0) as raw:
        start, first = 0, 1
        while start < size:
            raw.seek(start)
            lines, left, ended = 0, target, True
            while left and (block := raw.read(min(BLOCK, left))):
                lines += block.count(b"\n")
                left -= len(block)
                ended = block.endswith(b"\n")
            stop = raw.tell()
            while not ended and (block := raw.read(BLOCK)):
                end = block.find(b"\n") + 1
                lines += bool(end)
                stop += end or len(block)
                ended = bool(end)
            yield start, stop, first
            start, first = stop, first + lines


def read_lines(stream: BinaryIO, size: int | None, first: int, as_json: bool) -> Iterator[Numbered]:
    """(line's number, row or BadRow) of at most `size` bytes; blank lines are no rows."""
    number, left = first, size
    for line in stream:
        text = line.removeprefix(codecs.BOM_UTF8).strip()
        if text:
            yield number, parse_line(text) if as_json else {"text": text.decode("utf-8", "surrogateescape")}
        number += 1
        if left is not None:
            left -= len(line)
            if left <= 0:
                return


def parse_line(line: bytes) -> Any:
    """The row of one line, or the BadRow that it is."""
    text = line.decode("utf-8", "surrogateescape")
    try:
        return decode(text)
    except json.JSONDecodeError as error:
        near = quoted(text[max(0, error.pos - 20) : error.pos + 20])
        return BadRow(
            "a line that is no JSON", "mend that line", f"{error.msg} at column {error.colno}, near {near}"
        )
    except RecursionError:
        return BadRow("a line that is nested too deeply", "write it flatter or remove it")


def read_csv(stream: BinaryIO, name: str, tabs: bool) -> Iterator[Numbered]:
    """(number of its first line, row or BadRow) below a header line. Quoted cells may hold newlines.

    Raises:
        UserError: the header has the same name twice, or a quote is never closed.
    """
    csv.field_size_limit(LONGEST_CELL)
    text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
    above = 0
    while (start := text.readline()) and not start.strip():
        above += 1
    separator = "\t" if tabs else _separator(start)
    reader = csv.reader(_lines(start, text), delimiter=separator, strict=True)
    header: list[str] = []
    while True:
        line = above + reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end" in str(error) or "field larger" in str(error):
                raise UserError(
                    f"{name}: a quote opens in the row at line {line} and never closes; close it (a quote within "
                    "a quoted cell is written twice)"
                ) from None
            yield (
                line,
                BadRow("a row that is no CSV", "write a quote within a quoted cell twice", str(error)),
            )
            continue
        if not header:
            header = _header(cells, name)
        elif cells:
            yield line, _csv_row(header, cells)


def _lines(start: str, rest: io.TextIOWrapper) -> Iterator[str]:
    yield start
    yield from rest


def _separator(header: str) -> str:
    """The one that makes most columns of the header line, where names hold no such character."""
    return max(SEPARATORS, key=lambda separator: len(next(csv.reader([header], delimiter=separator), [])))


def _header(cells: list[str], name: str) -> list[str]:
    # pandas writes its index as a column without a name
    names = [cell.strip() or f"column {number}" for number, cell in enumerate(cells, 1)]
    double = next((cell for cell in names if names.count(cell) > 1), None)
    if double is not None:
        raise UserError(f"{name} has two columns called {double} in its first line; give each its own name")
    return names


def _csv_row(header: list[str], cells: list[str]) -> Any:
    if len(cells) != len(header):
        return BadRow(
            "another number of cells than the header has",
            "quote cells that hold a separator or a newline",
            f"{len(cells)} cells",
            f"{len(header)}: {', '.join(header)}",
        )
    return dict(zip(header, cells, strict=True))
