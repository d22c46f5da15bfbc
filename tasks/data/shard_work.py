"""One shard of the sources, from its rows to sorted runs on disk; what a worker process does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple

from tasks.contracts import Contract, Count
from tasks.data.album import ShardAlbum, unchanged
from tasks.data.formats import canonical
from tasks.data.rows import BadRow, Row
from tasks.data.runs import Keyed, RunWriter
from tasks.data.shards import RawRow, Shard, read_shard
from tasks.data.templates import Encoder
from tasks.params import Params
from tasks.paths import Paths

ROWS_AT_ONCE = 1000
REPORT, BAD_ROWS, MENDED_ROWS = "report.json", "bad.jsonl", "mended.jsonl"


@dataclass(frozen=True)
class Job:
    """A shard to prepare into `folder`, which appears only when it is whole.

    recipe: hash of what says what a row becomes. limit: read no more rows.
    stop: end at the first bad row.
    """

    shard: Shard
    params: Params
    paths: Paths
    folder: Path
    recipe: str
    buckets: int
    limit: int | None
    stop: bool

    @property
    def repair(self) -> bool:
        return self.params.prepare_data.on_bad_row == "repair"


class Bad(Contract):
    """A row left out as bad; `position` is in its shard."""

    position: Count
    where: str
    reason: str
    fix: str
    found: str = ""
    allowed: str = ""
    piece: bool = False

    @classmethod
    def of(cls, position: int, where: str, error: BadRow, piece: bool = False) -> Bad:
        said = {"reason": error.reason, "fix": error.fix, "found": error.found, "allowed": error.allowed}
        return cls(position=position, where=where, piece=piece, **said)

    @property
    def sentence(self) -> str:
        """What stops a run whose rows must all be good."""
        said = f"{self.reason}: {self.found}" if self.found else self.reason
        said += f" (allowed: {self.allowed})" if self.allowed else ""
        return (
            f"{self.where}: {said}, and every row must hold a conversation that can be learnt; "
            f"{self.fix}, or set prepare_data.on_bad_row: reject to leave such rows out"
        )


class ShardReport(Contract):
    """Rows read, rows of each sorted run, distinct pictures; `stopped`: the bad row that ended the work, with nothing
    kept.
    """

    rows_in: Count
    runs: tuple[Count, ...]
    pictures: Count = 0
    stopped: Bad | None = None


_ENCODERS: dict[str, Encoder] = {}  # the last one used, by recipe: a worker does many shards


def _encoder(job: Job) -> Encoder:
    if job.recipe not in _ENCODERS:
        _ENCODERS.clear()
        _ENCODERS[job.recipe] = Encoder.of(job.params, job.paths)
    return _ENCODERS[job.recipe]


def finished(job: Job) -> ShardReport | None:
    """The report of a shard that an earlier run has prepared, if all images that it read are as they were."""
    path = job.folder / REPORT
    if not path.is_file() or not unchanged(job.folder, job.shard.folder):
        return None
    return ShardReport.read(path)


def prepare_shard(job: Job, tick: Callable[[int], object] | None = None) -> ShardReport:
    """Reads, checks, encodes and sorts a shard's rows.

    Args:
        tick: is told how many rows more have been read.

    Raises:
        UserError: the source cannot be read.
    """
    done = finished(job)
    if done is not None:
        return done
    shutil.rmtree(job.folder, ignore_errors=True)
    fresh = job.folder.with_name(f"{job.folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        with (
            (fresh / BAD_ROWS).open("w", encoding="utf-8") as bad_rows,
            (fresh / MENDED_ROWS).open("w", encoding="utf-8") as mended_rows,
        ):
            encoder = _encoder(job)
            album = ShardAlbum(fresh, job.shard.folder, encoder.vision)
            runs = RunWriter(fresh, job.buckets)
            report = _Work(job, encoder, album, runs, bad_rows, mended_rows).run(tick)
        if report.stopped is None:
            report.write(fresh / REPORT)
            fresh.rename(job.folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return report


class _Read(NamedTuple):
    """A row as it was read, or why it is bad; `piece`: it is a later piece of a text."""

    position: int
    piece: bool
    where: str
    row: Row | BadRow


class _Stopped(Exception):
    def __init__(self, bad: Bad) -> None:
        super().__init__(bad.reason)
        self.bad = bad


@dataclass
class _Work:
    job: Job
    encoder: Encoder
    album: ShardAlbum
    runs: RunWriter
    bad_rows: IO[str]
    mended_rows: IO[str]
    rows_in: int = 0

    def run(self, tick: Callable[[int], object] | None) -> ShardReport:
        rows = islice(read_shard(self.job.shard), self.job.limit)
        stopped = None
        try:
            while count := self._prepare(islice(rows, ROWS_AT_ONCE)):
                if tick:
                    tick(count)
            self.runs.flush()
        except _Stopped as error:
            stopped = error.bad
        finally:
            self.album.close()
        pictures = len(self.album)
        return ShardReport(
            rows_in=self.rows_in, runs=tuple(self.runs.rows), pictures=pictures, stopped=stopped
        )

    def _prepare(self, chunk: Iterator[RawRow | tuple[str, BadRow]]) -> int:
        """Returns how many rows the chunk has: read one by one, since each may hold pictures."""
        read: list[_Read] = []
        before = self.rows_in
        for raw in chunk:
            read += self._rows(self.rows_in, raw)
            self.rows_in += 1
        encoded = iter(self.encoder.encode([found.row for found in read if isinstance(found.row, Row)]))
        kept = []
        for found in read:
            result = next(encoded) if isinstance(found.row, Row) else found.row
            if isinstance(result, BadRow):
                self._reject(Bad.of(found.position, found.where, result, found.piece))
            elif isinstance(found.row, Row):
                prompt = self.encoder.prompt(found.row) if found.row.pictures else None
                kept.append(Keyed(found.row, result, found.position, found.piece, prompt))
        self.runs.add(kept)
        return self.rows_in - before

    def _rows(self, position: int, raw: RawRow | tuple[str, BadRow]) -> Iterator[_Read]:
        if isinstance(raw, tuple):
            yield _Read(position, False, raw[0], raw[1])
            return
        source = self.job.shard.source
        try:
            row = self.album.decoded(canonical(raw, source.form, source.columns, self.job.repair))
        except BadRow as error:
            yield _Read(position, False, raw.where, error)
            return
        if row.mended:
            self.mended_rows.write(json.dumps([position, row.mended], ensure_ascii=False) + "\n")
        for number, piece in enumerate(self.encoder.pieces(row)):
            yield _Read(position, number > 0, raw.where, piece)

    def _reject(self, bad: Bad) -> None:
        if self.job.stop:
            raise _Stopped(bad)
        self.bad_rows.write(json.dumps(bad.model_dump(), ensure_ascii=False) + "\n")
