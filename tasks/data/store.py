"""Writes the prepared rows: one Arrow file a split, with bytes that depend on the content alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from tasks.contracts import LengthBin, SplitCounts
from tasks.data.rows import Row
from tasks.data.templates import IGNORED, Encoded

SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("labels", pa.list_(pa.int32())),
        ("id", pa.string()),
        ("prompt", pa.string()),
        ("reference", pa.string()),
    ]
)


@dataclass(frozen=True)
class Prepared:
    """A row with its ids and labels."""

    row: Row
    encoded: Encoded


def write_split(path: Path, rows: Sequence[Prepared]) -> None:
    """Writes `rows` in the order of their ids, so that the source's order never matters."""
    ordered = sorted(rows, key=lambda item: item.row.id)
    table = pa.table(
        {
            "input_ids": [item.encoded.input_ids for item in ordered],
            "labels": [item.encoded.labels for item in ordered],
            "id": [item.row.id for item in ordered],
            "prompt": [json.dumps(item.row.prompt, ensure_ascii=False) for item in ordered],
            "reference": [item.row.answer for item in ordered],
        },
        schema=SCHEMA,
    )
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        writer.write_table(table, max_chunksize=10_000)


def counts(rows: Sequence[Prepared]) -> SplitCounts:
    lengths = [len(item.encoded.input_ids) for item in rows]
    return SplitCounts(
        rows=len(rows),
        tokens=sum(lengths),
        target_tokens=sum(sum(label != IGNORED for label in item.encoded.labels[1:]) for item in rows),
        longest=max(lengths, default=0),
    )


def histogram(rows: Sequence[Prepared]) -> tuple[LengthBin, ...]:
    """Rows by length in tokens, in bins up to powers of two."""
    lengths = [len(item.encoded.input_ids) for item in rows]
    bins, upper, lower = [], 16, 0
    while lower < max(lengths, default=0):
        bins.append(LengthBin(upper=upper, rows=sum(lower < length <= upper for length in lengths)))
        lower, upper = upper, upper * 2
    return tuple(bins)


def content_hash(folder: Path) -> str:
    """Hash of both splits' bytes."""
    digest = hashlib.sha256()
    for name in ("train", "validation"):
        digest.update((folder / f"{name}.arrow").read_bytes())
    return digest.hexdigest()
