"""`elastane data`: what prepare_data made, to look at: sources, lengths, what was left out, rows with learnt tokens."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Literal

from tasks.contracts import DataManifest
from tasks.data.image_turns import with_sizes
from tasks.data.prepared import IGNORED, Split
from tasks.data.templates import load_tokenizer
from tasks.data.vision import Vision
from tasks.errors import UserError
from tasks.params import Params
from tasks.paths import Paths

REPORTED = 2  # rows that reports show
SplitName = Literal["train", "validation"]


@dataclass(frozen=True)
class Span:
    """Neighbouring tokens of a row that are all learnt, or none of them."""

    text: str
    learnt: bool


@dataclass(frozen=True)
class Sample:
    """A prepared row: its number in the split, how many tokens it has and how many are learnt, and its text."""

    row: int
    tokens: int
    learnt: int
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class DataView:
    """`rejected`: the first rows of rejected.jsonl, at most as many as were asked for of each reason."""

    manifest: DataManifest
    split: SplitName
    samples: tuple[Sample, ...]
    rejected: tuple[dict[str, Any], ...]

    def to_json(self) -> str:
        manifest: dict[str, Any] = json.loads(self.manifest.to_json())
        samples = [asdict(sample) for sample in self.samples]
        shown = {"split": self.split, "samples": samples, "rejected": list(self.rejected)}
        return json.dumps({"manifest": manifest} | shown, indent=2, ensure_ascii=False)


def look(params: Params, paths: Paths, split: SplitName, rows: list[int] | None, count: int) -> DataView:
    """Reads data/prepared.

    Args:
        rows: numbers of the rows to show, from 0; None takes `count` of them, evenly spread.

    Raises:
        UserError: nothing is prepared, or there is no such row.
    """
    if not paths.manifest.is_file():
        raise UserError(f"{paths.prepared} holds no prepared data yet; run `elastane run` first")
    opened = Split.open(paths.prepared, split)
    wanted = _spread(len(opened), count) if rows is None else rows
    for row in wanted:
        if not 0 <= row < len(opened):
            raise UserError(
                f"--row {row} is not in {split}, which has {len(opened)} rows; give 0 to {len(opened) - 1}"
            )
    model = params.model
    tokenizer = load_tokenizer(paths.base, model.name_or_path, model.trust_remote_code)
    vision = Vision.of(paths.base, tokenizer, model.name_or_path) if opened.album is not None else None
    samples = tuple(_sample(opened, row, tokenizer, vision) for row in wanted)
    return DataView(DataManifest.read(paths.manifest), split, samples, _rejected(paths, count))


def _spread(total: int, count: int) -> list[int]:
    shown = min(count, total)
    return [number * total // shown for number in range(shown)]


def _sample(split: Split, row: int, tokenizer: Any, vision: Vision | None) -> Sample:
    sizes = split.image_sizes()[split.image_numbers(row)].tolist()
    ids, labels = split.tokens(row)
    learnt = (labels != IGNORED).tolist()
    spans = []
    for is_learnt, group in groupby(range(len(ids)), key=learnt.__getitem__):
        text = tokenizer.decode(ids[list(group)].tolist(), clean_up_tokenization_spaces=False)
        spans.append(Span(with_sizes(str(text), sizes, vision.token) if vision else str(text), is_learnt))
    return Sample(row, len(ids), sum(learnt), tuple(spans))


def _rejected(paths: Paths, count: int) -> tuple[dict[str, Any], ...]:
    """The first `count` of each reason, in the order of the file."""
    seen: dict[str, int] = {}
    shown = []
    with paths.rejected.open(encoding="utf-8") as file:
        for line in file:
            entry: dict[str, Any] = json.loads(line)
            reason = str(entry["reason"])
            seen[reason] = seen.get(reason, 0) + 1
            if seen[reason] <= count:
                shown.append(entry)
    return tuple(shown)
