"""The sources cut into shards, and which of them an earlier, unfinished run has already prepared."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tasks.data.accounts import Shared
from tasks.data.crew import Crew, WorkerLost
from tasks.data.merge import Merge, Run
from tasks.data.shard_work import Job, ShardReport, finished, prepare_shard
from tasks.data.shards import Shard, shards_of
from tasks.data.sources import Source, size_of
from tasks.data.table_check import check_tables
from tasks.errors import UserError
from tasks.params import Params
from tasks.paths import Paths
from tasks.stage import progress, say

VERSION = 2  # to be raised whenever the same rows become other tokens, or runs have another form
LIBRARIES = ("transformers", "tokenizers", "pyarrow", "pillow")  # what they give may change with them
WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt")

SHARDS = 128  # of large sources
SHARD_BYTES = (2 << 20, 32 << 20)
BUCKET_BYTES = 16 << 20
MOST_BUCKETS = 1024


@dataclass(frozen=True)
class Known:
    """A source whose format is known, and the hash of what it holds."""

    source: Source
    form: str
    fingerprint: str


@dataclass(frozen=True)
class Layout:
    """How sources are cut, (number of the source, shard); nothing of it shows in what is prepared."""

    shards: tuple[tuple[int, Shard], ...]
    buckets: int

    @classmethod
    def of(cls, sources: Sequence[Source]) -> Layout:
        size = sum(size_of(source) for source in sources)
        target = min(max(size // SHARDS, SHARD_BYTES[0]), SHARD_BYTES[1])
        shards = [
            (number, shard) for number, source in enumerate(sources) for shard in shards_of([source], target)
        ]
        return cls(tuple(shards), 1 << min(size // BUCKET_BYTES, MOST_BUCKETS - 1).bit_length())

    @property
    def bytes(self) -> int:
        return sum(shard.size for _, shard in self.shards)


@dataclass
class Parts:
    """The prepared shards in the order of the sources, of which at most `max_rows` rows each count."""

    max_rows: int | None
    numbers: list[int] = field(default_factory=list)  # of the shards' sources
    jobs: list[Job] = field(default_factory=list)
    reports: list[ShardReport] = field(default_factory=list)

    def rows_of(self, source: int) -> int:
        """Rows read of a source so far."""
        pairs = zip(self.numbers, self.reports, strict=False)
        return sum(report.rows_in for number, report in pairs if number == source)

    def shared(self) -> list[Shared]:
        before: Counter[int] = Counter()
        found = []
        for number, job, report in zip(self.numbers, self.jobs, self.reports, strict=True):
            rest = report.rows_in if self.max_rows is None else max(0, self.max_rows - before[number])
            name = job.shard.name
            found.append(Shared(job.folder, number, name, before[number], min(report.rows_in, rest)))
            before[number] += report.rows_in
        return found

    def merge(self, weights: Sequence[float], buckets: int) -> Merge:
        runs = [
            Run(shared.folder / f"{number}.arrow", rows, shard, shared.number, shared.rows)
            for shard, (shared, report) in enumerate(zip(self.shared(), self.reports, strict=True))
            for number, rows in enumerate(report.runs)
        ]
        return Merge(tuple(runs), tuple(weights), buckets)


def prepare_parts(known: Sequence[Known], layout: Layout, params: Params, paths: Paths, crew: Crew) -> Parts:
    """Prepares what is not there yet, in the order of the sources.

    Raises:
        UserError: a source cannot be read, or a row is bad and on_bad_row is stop.
    """
    todo = _todo(known, layout, params, paths)
    _keep_only({job.folder.name for _, job in todo}, paths.preparing)
    done = sum(finished(job) is not None for _, job in todo)
    if done:
        say(f"prepare_data: {done} of {len(todo)} parts were prepared before and are kept")
    parts = Parts(params.prepare_data.max_rows)

    def begun() -> Iterator[Job]:
        for number, job in todo:
            if parts.max_rows is None or parts.rows_of(number) < parts.max_rows:
                parts.numbers.append(number)
                parts.jobs.append(job)
                yield job

    size, read = layout.bytes, 0
    with progress("prepare rows", None) as bar:
        work = partial(prepare_shard, tick=bar.update) if crew.alone else prepare_shard
        for report in _named(parts, crew.ordered(work, begun())):
            if report.stopped is not None:
                _remove_empty(paths.preparing)
                raise UserError(report.stopped.sentence)
            read += parts.jobs[len(parts.reports)].shard.size
            parts.reports.append(report)
            rows = sum(report.rows_in for report in parts.reports)
            bar.total = round(rows * size / read) if read else None
            bar.update(rows - bar.n)
    return parts


def _named(parts: Parts, reports: Iterator[ShardReport]) -> Iterator[ShardReport]:
    """The reports; where a worker died of a damaged table, an error that names the file."""
    try:
        yield from reports
    except WorkerLost:
        shards = [job.shard for job in parts.jobs[len(parts.reports) :]]
        check_tables([(shard.name, shard.address, shard.kind) for shard in shards], whole=True)
        raise


def _todo(known: Sequence[Known], layout: Layout, params: Params, paths: Paths) -> list[tuple[int, Job]]:
    wanted = params.prepare_data
    recipe = _recipe(params, paths, layout.buckets)
    stop = wanted.on_bad_row == "stop" and wanted.max_rows is None
    jobs = []
    for number, shard in layout.shards:
        source = known[number]
        identity = f"{recipe} {source.fingerprint} {wanted.max_rows} {shard!r}"
        folder = paths.preparing / hashlib.sha256(identity.encode()).hexdigest()[:32]
        job = Job(shard, params, paths, folder, recipe, layout.buckets, wanted.max_rows, stop)
        jobs.append((number, job))
    return jobs


def _recipe(params: Params, paths: Paths, buckets: int) -> str:
    """Hash of all that says what a row becomes, the row aside."""
    wanted = params.prepare_data
    files = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(paths.base.iterdir())
        if file.is_file() and file.suffix not in WEIGHTS
    }
    template = paths.root / wanted.template
    said = {
        "version": VERSION,
        "libraries": {name: importlib.metadata.version(name) for name in LIBRARIES},
        "model": files,
        "template": template.read_text(encoding="utf-8") if template.is_file() else wanted.template,
        "learn": wanted.learn,
        "max_length": wanted.max_length,
        "repair": wanted.on_bad_row == "repair",
        "buckets": buckets,
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _keep_only(names: set[str], folder: Path) -> None:
    """Removes what other sources or params left here, or a process that was killed."""
    if folder.is_dir():
        for there in folder.iterdir():
            if there.name not in names:
                shutil.rmtree(there, ignore_errors=True)


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
