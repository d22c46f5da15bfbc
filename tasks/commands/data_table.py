"""`elastane data` as one table: splits, sources, lengths, what was left out and what was mended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tasks.commands.data import DataView
from tasks.contracts import DataManifest

COLUMNS = ("part", "name", "rows", "tokens", "share", "said")
Line = tuple[str, str, int, int | None, float, str]


def table(view: DataView) -> list[dict[str, Any]]:
    """Lines of the same columns (COLUMNS).

    A share is of the kept rows (splits, lengths), of the tokens (sources), or of the rows read (left out, mended).
    """
    manifest = view.manifest
    first: dict[str, str] = {}
    for entry in view.rejected:
        first.setdefault(str(entry["reason"]), f"first at {entry.get('where', '')}: {entry.get('fix', '')}")
    lines = [*_kept(manifest), *_counted("left out", manifest, manifest.rejected, first)]
    lines += _counted("mended", manifest, manifest.mended, {})
    return [dict(zip(COLUMNS, line, strict=True)) for line in lines]


def _kept(manifest: DataManifest) -> Iterator[Line]:
    kept = max(1, manifest.train.rows + manifest.validation.rows)
    for name, split in (("train", manifest.train), ("validation", manifest.validation)):
        learnt = f"{split.target_tokens:,} tokens learnt"
        yield "split", name, split.rows, split.tokens, split.rows / kept, learnt
    tokens = max(1, sum(source.tokens for source in manifest.sources))
    for one in manifest.sources:
        said = f"{one.format}, {one.rows_in:,} rows in, weight {one.weight:g}"
        yield "source", one.name, one.train_rows + one.validation_rows, one.tokens, one.tokens / tokens, said
    for length in manifest.length_histogram:
        yield "length", f"up to {length.upper:,} tokens", length.rows, None, length.rows / kept, ""


def _counted(
    part: str, manifest: DataManifest, counts: dict[str, int], said: dict[str, str]
) -> Iterator[Line]:
    for what, count in sorted(counts.items(), key=lambda item: -item[1]):
        yield part, what, count, None, count / max(1, manifest.rows_in), said.get(what, "")
