"""Today's readers and encoder behind the names that the pipeline uses."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from tasks.data.docstrings import docstring_rows, fingerprint
from tasks.data.formats import RawRow, read_file, read_hub, rows_hash
from tasks.data.formats import canonical as canonical_now
from tasks.data.formats import detect as detect_now
from tasks.data.rows import BadRow, Row
from tasks.data.templates import Encoded, encode, load_tokenizer
from tasks.params import Params, PrepareDataParams, SourceParams
from tasks.paths import Paths

BUILTIN = "docstrings"


@dataclass(frozen=True)
class Source:
    """One source of rows; `files` is empty for the built-in set and hub ids."""

    name: str
    form: str
    columns: Mapping[str, str] = field(default_factory=dict)
    weight: float = 1.0
    files: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Shard:
    """Bytes [start, end) of a JSONL file whose line `first` starts there; else a whole source."""

    source: Source
    start: int = 0
    end: int = 0
    first: int = 1

    @property
    def size(self) -> int:
        return self.end - self.start


def sources_of(wanted: PrepareDataParams, root: Path) -> list[Source]:
    sources = _sources_of(wanted, root)
    for source in sources:
        if source.files and not source.files[0].is_file():
            read_file(source.files[0], source.name)  # says what is wrong
    return sources


def _sources_of(wanted: PrepareDataParams, root: Path) -> list[Source]:
    said = (
        [SourceParams(source=wanted.source, format=wanted.format, columns=wanted.columns)]
        if isinstance(wanted.source, str)
        else wanted.source
    )
    return [Source(one.source, one.format, one.columns, one.weight, _files(one.source, root)) for one in said]


def _files(name: str, root: Path) -> tuple[Path, ...]:
    if name == BUILTIN:
        return ()
    path = root / Path(name).expanduser()
    named_as_path = name.startswith((".", "/", "~")) or name.count("/") != 1
    local = named_as_path or path.suffix.lower() in (".json", ".jsonl") or path.exists()
    return (path,) if local else ()


def fingerprint_of(source: Source) -> str:
    if source.name == BUILTIN:
        return fingerprint()
    if not source.files:
        return rows_hash(read_hub(source.name, None))
    if not source.files[0].is_file():
        return ""
    with source.files[0].open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def shards_of(sources: Sequence[Source], target_bytes: int) -> list[Shard]:
    return [shard for source in sources for shard in _shards(source, target_bytes)]


def _shards(source: Source, target_bytes: int) -> Iterator[Shard]:
    if not source.files or source.files[0].suffix.lower() != ".jsonl" or not source.files[0].is_file():
        size = source.files[0].stat().st_size if source.files and source.files[0].is_file() else 0
        yield Shard(source, 0, size)
        return
    size = source.files[0].stat().st_size
    with source.files[0].open("rb") as file:
        start, first = 0, 1
        while start < size or start == 0:
            lines = file.read(target_bytes).count(b"\n") + (1 if file.readline() else 0)
            yield Shard(source, start, file.tell(), first)
            start, first = file.tell(), first + lines
            if start >= size:
                return


def size_of(source: Source) -> int:
    return sum(file.stat().st_size for file in source.files if file.is_file())


def read_shard(shard: Shard) -> Iterator[RawRow | tuple[str, BadRow]]:
    import json

    source = shard.source
    if source.name == BUILTIN:
        for row in docstring_rows():
            yield RawRow(row, row.where)
    elif not source.files:
        yield from read_hub(source.name, None)
    elif shard.size == size_of(source):
        yield from read_file(source.files[0], source.name)
    else:
        with source.files[0].open("rb") as file:
            file.seek(shard.start)
            for number, line in enumerate(_lines(file, shard.size), shard.first):
                if line.strip():
                    yield RawRow(json.loads(line), f"{source.name}: line {number}")


def _lines(file: Iterable[bytes], size: int) -> Iterator[bytes]:
    for line in file:
        yield line
        size -= len(line)
        if size <= 0:
            return


def detect(rows: list[RawRow], name: str) -> tuple[str, str]:
    if name == BUILTIN:
        return "chat", "it is built in"
    return detect_now(rows, name)


def canonical(raw: RawRow, form: str, columns: Mapping[str, str], repair: bool = False) -> Row:
    if isinstance(raw.content, Row):
        return raw.content
    assert not columns and not repair
    return canonical_now(raw, form)  # type: ignore[arg-type]


class Encoder:
    """Today's `encode`, row by row."""

    def __init__(self, params: Params, paths: Paths) -> None:
        model = params.model
        self.tokenizer = load_tokenizer(paths.base, model.name_or_path, model.trust_remote_code)
        self.max_length = params.prepare_data.max_length

    @classmethod
    def of(cls, params: Params, paths: Paths) -> Encoder:
        return cls(params, paths)

    def pieces(self, row: Row) -> Iterator[Row]:
        yield row

    def encode(self, rows: Sequence[Row]) -> list[Encoded | BadRow]:
        return [self._one(row) for row in rows]

    def _one(self, row: Row) -> Encoded | BadRow:
        try:
            return encode(self.tokenizer, row, self.max_length)
        except BadRow as error:
            return error


def first_rows(source: Source, count: int) -> list[RawRow | tuple[str, BadRow]]:
    return list(islice(read_shard(shards_of([source], 1 << 24)[0]), count))
