"""Every row that is left out, with its place, the reason and the fix; and when there are too many of them."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.data.shard_work import BAD_ROWS, MENDED_ROWS, Bad
from tasks.errors import UserError

NAMED_REASONS = 3  # in the message that stops a run
PLACE = re.compile(r"(?P<file>.*): (?:row|line) (?P<row>\d+)$", re.DOTALL)
DUPLICATE_ROW = ("duplicate", "none needed: the same row is kept once")
NEAR_DUPLICATE = ("near-duplicate of a training row", "none needed: it would only flatter the evaluation")


@dataclass(frozen=True)
class Shared:
    """A shard's share in the whole: `rows` of it count, and `before` rows of its source stand in earlier shards."""

    folder: Path
    number: int  # of its source
    file: str
    before: int
    rows: int

    def bad_rows(self) -> Iterator[Bad]:
        """The bad ones among the rows that count, in the source's order."""
        with (self.folder / BAD_ROWS).open(encoding="utf-8") as file:
            for line in file:
                bad = Bad.model_construct(**json.loads(line))
                if bad.position < self.rows:
                    yield bad

    def mended(self) -> Iterator[str]:
        """What was mended in the rows that count."""
        with (self.folder / MENDED_ROWS).open(encoding="utf-8") as file:
            for line in file:
                position, mended = json.loads(line)
                if position < self.rows:
                    yield from mended


@dataclass
class BadRows:
    """The bad rows of all shards: how many for each reason, and the first one of each; `pieces` of texts among them."""

    count: int = 0
    pieces: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    first: dict[str, Bad] = field(default_factory=dict)

    @classmethod
    def of(cls, shards: Sequence[Shared]) -> BadRows:
        found = cls()
        for shard in shards:
            for bad in shard.bad_rows():
                found.count += 1
                found.pieces += bad.piece
                found.reasons[bad.reason] += 1
                found.first.setdefault(bad.reason, bad)
        return found

    def refuse_too_many(self, name: str, rows_in: int, allowed: float) -> None:
        """Raises UserError where more than the share `allowed` of all rows are bad."""
        if self.count <= allowed * rows_in:
            return
        said = "; ".join(
            f"{count} {reason} (the first is {self.first[reason].where}: {self.first[reason].fix})"
            for reason, count in self.reasons.most_common(NAMED_REASONS)
        )
        raise UserError(
            f"prepare_data.source={name}: {self.count} of {rows_in} rows are bad, more than "
            f"prepare_data.max_rejected={allowed:g} allows: {said}; mend the source, its format or columns, "
            "or raise prepare_data.max_rejected"
        )


class LeftOut:
    """Collects rows left out as they are met in the order of ids, and lists all in the order of the sources."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def add(self, shard: int, rows: Sequence[tuple[int, str]], why: tuple[str, str]) -> None:
        """Args: rows: (position in the shard, where) of each; why: reason and fix."""
        reason, fix = why
        with self._path(shard).open("a", encoding="utf-8") as file:
            for position, where in rows:
                bad = Bad(position=position, where=where, reason=reason, fix=fix)
                file.write(json.dumps(bad.model_dump(), ensure_ascii=False) + "\n")

    def write(self, path: Path, shards: Sequence[Shared]) -> None:
        """Writes rejected.jsonl: these and the bad rows. Rows of one shard at a time are held in memory."""
        with path.open("w", encoding="utf-8") as file:
            for number, shard in enumerate(shards):
                rows = [*shard.bad_rows(), *self._of(number)]
                for bad in sorted(rows, key=lambda bad: bad.position):
                    line = json.dumps(_line(bad, shard), ensure_ascii=False, sort_keys=True)
                    file.write(line + "\n")
        shutil.rmtree(self._folder)

    def _path(self, shard: int) -> Path:
        return self._folder / f"{shard}.jsonl"

    def _of(self, shard: int) -> list[Bad]:
        if not self._path(shard).is_file():
            return []
        with self._path(shard).open(encoding="utf-8") as file:
            return [Bad.model_construct(**json.loads(line)) for line in file]


def _line(bad: Bad, shard: Shared) -> dict[str, Any]:
    place = PLACE.match(bad.where)
    line = {
        "file": place["file"] if place else shard.file,
        "row": int(place["row"]) if place else shard.before + bad.position + 1,
        "where": bad.where,
        "reason": bad.reason,
        "found": bad.found,
        "allowed": bad.allowed,
        "fix": bad.fix,
    }
    return {key: value for key, value in line.items() if value}
