"""Writes the prepared rows: one Arrow file a split, with bytes that depend on the content alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
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


def content_hash(splits: Mapping[str, Sequence[Prepared]]) -> str:
    """Hash of what the splits hold, not of the files: another Arrow version may write other bytes."""
    digest = hashlib.sha256()
    for name, rows in sorted(splits.items()):
        digest.update(f"{name} {len(rows)}\n".encode())
        for item in sorted(rows, key=lambda item: item.row.id):
            digest.update(f"{item.row.id} {len(item.encoded.input_ids)}\n".encode())
            digest.update(np.array([item.encoded.input_ids, item.encoded.labels], dtype="<i4").tobytes())
    return digest.hexdigest()
