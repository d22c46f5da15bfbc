"""Stage prepare_data: the source's rows -> token ids and labels, split in two, every row accounted for."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.contracts import DataManifest, write_text
from tasks.data.docstrings import docstring_rows, fingerprint
from tasks.data.formats import RawRow, canonical, detect, read_file, read_hub, rows_hash
from tasks.data.rows import BadRow, Row
from tasks.errors import UserError
from tasks.params import Params, PrepareDataParams
from tasks.paths import Paths
from tasks.stage import heartbeat, say, stage_main

if TYPE_CHECKING:
    from tasks.data.store import Prepared

BUILTIN = "docstrings"


@dataclass(frozen=True)
class Source:
    """What was read: the rows that can be learnt, how many there were, and the fingerprint of them all."""

    rows: list[Row]
    form: str
    rows_in: int
    fingerprint: str


@dataclass
class Rejections:
    """Rows left out, by reason; `stop` makes the first bad one an error."""

    stop: bool
    lines: list[dict[str, str]] = field(default_factory=list)

    def bad(self, where: str, error: BadRow) -> None:
        if self.stop:
            raise UserError(
                f"{where}: {error.reason}, and every row must hold a conversation that can be learnt; "
                f"{error.fix}, or set prepare_data.on_bad_row: reject to leave such rows out"
            )
        self.set_aside(where, error.reason, error.fix)

    def set_aside(self, where: str, reason: str, fix: str) -> None:
        self.lines.append({"where": where, "reason": reason, "fix": fix})

    def by_reason(self) -> dict[str, int]:
        return dict(sorted(Counter(line["reason"] for line in self.lines).items()))


def prepare_data(params: Params, paths: Paths) -> DataManifest:
    """Brings data/base and data/prepared up to date; the old content stays until the new is whole.

    Raises:
        UserError: the source, a row (unless rejected) or the model is wrong.
    """
    wanted = params.prepare_data
    rejections = Rejections(wanted.on_bad_row == "stop")
    source = _read(wanted, paths, rejections)
    with heartbeat("looking for duplicates"):
        train, validation = _split(source.rows, wanted, rejections)
    _refuse_empty(train, validation, wanted, rejections)

    from tasks.trainer.base_model import ensure_base

    ensure_base(params.model, paths)
    kept = _encode({"train": train, "validation": validation}, params, paths, rejections)
    _refuse_empty(kept["train"], kept["validation"], wanted, rejections)
    manifest = _write(paths, params, source, kept, rejections)
    left_out = sum(manifest.rejected.values())
    say(
        f"prepare_data: {manifest.train.rows} rows to train on ({manifest.train.tokens:,} tokens), "
        f"{_packs(manifest)}"
        f"{manifest.validation.rows} held out ({manifest.validation.tokens:,} tokens), "
        f"{left_out} of {manifest.rows_in} left out"
        + "".join(f"; {count} {reason}" for reason, count in manifest.rejected.items())
    )
    return manifest


def _packs(manifest: DataManifest) -> str:
    packed = manifest.packed
    return f"packed into {packed.packs}, {packed.fill:.1%} full, " if packed else ""


def source_file(params: PrepareDataParams, paths: Paths) -> Path | None:
    """The local file that the source names, or None for the built-in set and hub ids."""
    if params.source == BUILTIN:
        return None
    path = paths.root / Path(params.source).expanduser()
    named_as_path = params.source.startswith((".", "/", "~")) or params.source.count("/") != 1
    local = named_as_path or path.suffix.lower() in (".json", ".jsonl") or path.exists()
    return path if local else None


def _file_hash(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def source_changed(params: Params, paths: Paths) -> bool:
    """Whether a local source is no longer what data/prepared was made from."""
    if not paths.manifest.is_file():
        return False
    file = source_file(params.prepare_data, paths)
    manifest = DataManifest.read(paths.manifest)
    if file is None or not file.is_file() or manifest.source != params.prepare_data.source:
        return False
    return _file_hash(file) != manifest.source_fingerprint


def _read(wanted: PrepareDataParams, paths: Paths, rejections: Rejections) -> Source:
    if wanted.source == BUILTIN:
        with heartbeat("reading the standard library's docstrings"):
            rows = list(islice(docstring_rows(), wanted.max_rows))
        return Source(rows, "chat", len(rows), fingerprint())
    raw, identity = _raw_rows(wanted, paths)
    form, evidence = (
        detect(raw, wanted.source) if wanted.format == "auto" else (wanted.format, "params.yaml says so")
    )
    say(f"prepare_data: {len(raw)} rows of {wanted.source}, read as {form} since {evidence}")
    rows = []
    for row in raw:
        try:
            rows.append(canonical(row, form))
        except BadRow as error:
            rejections.bad(row.where, error)
    return Source(rows, form, len(raw), identity)


def _raw_rows(wanted: PrepareDataParams, paths: Paths) -> tuple[list[RawRow], str]:
    """(at most `max_rows` rows, fingerprint of the source)."""
    file = source_file(wanted, paths)
    if file is None:
        with heartbeat(f"fetching {wanted.source} from the Hugging Face hub"):
            rows = read_hub(wanted.source, wanted.max_rows)
        return rows, rows_hash(rows)
    # Hashed before it is read: if it is edited meanwhile, source_changed says so afterwards.
    identity = _file_hash(file) if file.is_file() else ""
    rows = read_file(file, wanted.source)[: wanted.max_rows]
    if (paths.root / "data" / "raw").resolve() not in file.resolve().parents:
        say(f"prepare_data: {wanted.source} lies outside data/raw/, where alone `dvc repro` sees a change")
    return rows, identity


def _split(
    rows: Iterable[Row], wanted: PrepareDataParams, rejections: Rejections
) -> tuple[list[Row], list[Row]]:
    from tasks.data.split import held_out, near_duplicates

    seen: set[str] = set()
    train: list[Row] = []
    validation: list[Row] = []
    for row in rows:
        if row.id in seen:
            rejections.set_aside(row.where, "duplicate", "none needed: the same row is kept once")
            continue
        seen.add(row.id)
        (validation if held_out(row, wanted.validation_fraction) else train).append(row)
    alike = near_duplicates(train, validation, wanted.near_duplicate_threshold)
    for row in validation:
        if row.id in alike:
            rejections.set_aside(
                row.where,
                "near-duplicate of a training row",
                "none needed: it would only flatter the evaluation",
            )
    return train, [row for row in validation if row.id not in alike]


def _refuse_empty(
    train: list[Row] | list[Prepared],
    validation: list[Row] | list[Prepared],
    wanted: PrepareDataParams,
    rejections: Rejections,
) -> None:
    for name, side in (("to train on", train), ("held out", validation)):
        if not side:
            reasons = (
                ", ".join(f"{count} {reason}" for reason, count in rejections.by_reason().items()) or "none"
            )
            raise UserError(
                f"prepare_data.source={wanted.source} leaves no row {name} (left out: {reasons}); "
                "give more rows or change prepare_data.validation_fraction"
            )


def _encode(
    splits: dict[str, list[Row]], params: Params, paths: Paths, rejections: Rejections
) -> dict[str, list[Prepared]]:
    from tqdm import tqdm

    from tasks.data.store import Prepared
    from tasks.data.templates import encode, load_tokenizer

    model = params.model
    tokenizer = load_tokenizer(paths.base, model.name_or_path, model.trust_remote_code)
    quiet = 0.5 if sys.stderr.isatty() else 5
    kept: dict[str, list[Prepared]] = {}
    for name, rows in splits.items():
        kept[name] = []
        for row in tqdm(rows, desc=f"tokenize {name}", unit="row", mininterval=quiet, file=sys.stderr):
            try:
                kept[name].append(Prepared(row, encode(tokenizer, row, params.prepare_data.max_length)))
            except BadRow as error:
                rejections.bad(row.where, error)
    return kept


def _write(
    paths: Paths,
    params: Params,
    source: Source,
    kept: dict[str, list[Prepared]],
    rejections: Rejections,
) -> DataManifest:
    from tasks.data.packing import write_packs
    from tasks.data.prepared import Split
    from tasks.data.store import content_hash, counts, histogram, write_split

    wanted = params.prepare_data
    fresh = paths.prepared.with_name(f".{paths.prepared.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    for name, rows in kept.items():
        write_split(fresh / f"{name}.arrow", rows)
    packed = None
    if wanted.packing == "best_fit":
        packed = write_packs(fresh, Split.open(fresh, "train").lengths(), wanted.max_length)
    both = kept["train"] + kept["validation"]
    manifest = DataManifest(
        source=params.prepare_data.source,
        source_fingerprint=source.fingerprint,
        format=source.form,
        content_hash=content_hash(kept),
        max_length=params.prepare_data.max_length,
        rows_in=source.rows_in,
        train=counts(kept["train"]),
        validation=counts(kept["validation"]),
        truncated=sum(item.encoded.truncated for item in both),
        length_histogram=histogram(both),
        rejected=rejections.by_reason(),
        packed=packed,
    )
    manifest.write(fresh / paths.manifest.name)
    lines = [json.dumps(line, ensure_ascii=False, sort_keys=True) + "\n" for line in rejections.lines]
    write_text(fresh / paths.rejected.name, "".join(lines))
    shutil.rmtree(paths.prepared, ignore_errors=True)
    fresh.rename(paths.prepared)
    return manifest


def main() -> None:
    stage_main("prepare_data", prepare_data)


if __name__ == "__main__":
    main()
