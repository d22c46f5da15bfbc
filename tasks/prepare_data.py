"""Stage prepare_data: the sources' rows -> token ids and labels, split in two, every row accounted for."""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tasks.contracts import BaseModelRef, DataManifest, SourceCounts
from tasks.data.formats import canonical, detect
from tasks.data.rows import BadRow
from tasks.data.shards import first_rows
from tasks.data.sources import fingerprint_of, size_of, sources_of
from tasks.data.table_check import TABLES, check_tables
from tasks.errors import UserError
from tasks.params import Params, PrepareDataParams
from tasks.paths import Paths
from tasks.stage import heartbeat, say, stage_main

if TYPE_CHECKING:
    from tasks.data.accounts import BadRows, Shared
    from tasks.data.assemble import Assembled
    from tasks.data.parts import Known
    from tasks.data.shards import RawRow
    from tasks.data.sources import Source

Array = NDArray[Any]

LOOKED_AT = 1000  # first rows of a source, before the model is fetched
IN_PLACE_BYTES = 16 << 20  # of sources, up to which other processes would cost more than they save


def prepare_data(params: Params, paths: Paths) -> DataManifest:
    """Brings data/base and data/prepared up to date; the old content stays until the new is whole.

    What is finished when it is stopped is not done again, as long as sources and params stay the same.

    Raises:
        UserError: the source, a row (unless rejected) or the model is wrong, or too many rows are bad.
    """
    known = _look(params.prepare_data, paths)

    from tasks.data.chosen_template import ensure_template
    from tasks.data.crew import get_ready
    from tasks.trainer.base_model import ensure_base

    if sum(size_of(one.source) for one in known) > IN_PLACE_BYTES:
        get_ready()
    base = ensure_base(params.model, paths)
    ensure_template(params, paths)
    manifest = _prepare(known, params, paths)
    _give_rows(base, params, paths)
    left_out = sum(manifest.rejected.values())
    say(
        f"prepare_data: {manifest.train.rows} rows to train on ({manifest.train.tokens:,} tokens), "
        f"{_pictures(manifest)}{_packs(manifest)}"
        f"{manifest.validation.rows} held out ({manifest.validation.tokens:,} tokens), "
        f"{left_out} of {manifest.rows_in} left out"
        + "".join(f"; {count} {reason}" for reason, count in manifest.rejected.items())
    )
    if manifest.samples < params.global_batch:
        what = "packs" if manifest.packed else "rows"
        say(
            f"prepare_data: {manifest.samples} {what} to train on are fewer than the global batch of "
            f"{params.global_batch}: an epoch is one step, of all of them"
        )
    return manifest


def _pictures(manifest: DataManifest) -> str:
    train = manifest.train
    return f"with {train.images} pictures ({train.image_tokens:,} of the tokens), " if train.images else ""


def _packs(manifest: DataManifest) -> str:
    packed = manifest.packed
    return f"packed into {packed.packs}, {packed.fill:.1%} full, " if packed else ""


def inputs_changed(params: Params, paths: Paths) -> bool:
    """Whether a file that DVC does not watch, a local source or a .jinja template, is no longer what data/prepared and
    data/base were made from.
    """
    if not paths.manifest.is_file():
        return False
    if source_changed(params, paths):
        return True
    if not Path(params.prepare_data.template).suffix:
        return False  # and transformers need not be loaded to say so
    from tasks.data.chosen_template import template_changed

    return template_changed(params, paths)


def source_changed(params: Params, paths: Paths) -> bool:
    """Whether a local source is no longer what data/prepared was made from."""
    if not paths.manifest.is_file():
        return False
    manifest = DataManifest.read(paths.manifest)
    try:
        sources = sources_of(params.prepare_data, paths.root, fetch=False)
        if manifest.source != _name(params.prepare_data) or not any(source.paths for source in sources):
            return False
    except UserError:
        return False
    if not all(source.files for source in sources):
        return False  # of a hub data set among them nothing is known here
    return _joined([fingerprint_of(source) for source in sources]) != manifest.source_fingerprint


def _name(wanted: PrepareDataParams) -> str:
    return wanted.source if isinstance(wanted.source, str) else ", ".join(one.source for one in wanted.source)


def _joined(fingerprints: Sequence[str]) -> str:
    if len(fingerprints) == 1:
        return fingerprints[0]
    return hashlib.sha256(" ".join(fingerprints).encode()).hexdigest()


def _look(wanted: PrepareDataParams, paths: Paths) -> list[Known]:
    """The sources and their formats, from their first rows: what is wrong there is said before a model is fetched."""
    from tasks.data.parts import Known

    known = []
    for source in sources_of(wanted, paths.root):
        with heartbeat(f"reading {source.name}"):
            # Hashed before it is read: if it is edited meanwhile, source_changed says so afterwards.
            fingerprint = fingerprint_of(source)
            check_tables([(f.name, f.address, f.kind) for f in source.files], whole=_small(source))
            rows = first_rows(source, LOOKED_AT)
        form, evidence = detect(rows, source.name, source.columns, source.form)
        often = "" if source.weight == 1 else f", an epoch sees it {source.weight:g} times"
        say(f"prepare_data: {source.name} is read as {form} since {evidence}{often}")
        _say_outside(source, paths)
        if wanted.on_bad_row == "stop":
            _refuse_bad(rows[: wanted.max_rows], source)
        known.append(Known(source, form, fingerprint))
    return known


def _small(source: Source) -> bool:
    """Whether its tables, if it has any, are read whole before they are read here."""
    return sum(file.size for file in source.files if file.kind in TABLES) <= 2 * IN_PLACE_BYTES


def _refuse_bad(rows: Sequence[RawRow | tuple[str, BadRow]], source: Source) -> None:
    from tasks.data.shard_work import Bad

    for place, row in enumerate(rows):
        try:
            if isinstance(row, tuple):
                raise row[1]
            canonical(row, source.form, source.columns)
        except BadRow as error:
            bad = Bad.of(place, row[0] if isinstance(row, tuple) else row.where, error)
            raise UserError(bad.sentence) from None


def _say_outside(source: Source, paths: Paths) -> None:
    raw = (paths.root / "data" / "raw").resolve()
    if any(raw not in path.resolve().parents for path in source.paths):
        say(f"prepare_data: {source.name} lies outside data/raw/, where alone `dvc repro` sees a change")


def _prepare(known: Sequence[Known], params: Params, paths: Paths) -> DataManifest:
    from tasks.data.accounts import BadRows, LeftOut
    from tasks.data.assemble import decide, write_splits
    from tasks.data.crew import Crew, cores
    from tasks.data.packing import write_packs
    from tasks.data.parts import Layout, prepare_parts
    from tasks.data.prepared import Split
    from tasks.data.store import content_hash
    from tasks.data.vision import pixels_hash

    wanted = params.prepare_data
    layout = Layout.of([one.source for one in known])
    here = layout.bytes <= IN_PLACE_BYTES and all(_small(one.source) for one in known)
    with Crew(0 if here else cores()) as crew:
        parts = prepare_parts(known, layout, params, paths, crew)
        shared = parts.shared()
        bad = BadRows.of(shared)
        bad.refuse_too_many(_name(wanted), sum(shard.rows for shard in shared), wanted.max_rejected)
        merge = parts.merge([one.source.weight for one in known], layout.buckets)
        fates = decide(merge, wanted, paths.preparing / "index", crew)
    _refuse_empty(fates, bad, wanted)
    fresh = paths.prepared.with_name(f".{paths.prepared.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    lines = LeftOut(paths.preparing / "left-out")
    found = write_splits(merge, fates, fresh, lines)
    lines.write(fresh / paths.rejected.name, shared)
    with heartbeat("hashing what was prepared"):
        identity = content_hash(fresh, {name: split.rows for name, split in found.splits.items()})
    if found.pictures:  # the same ids and files may become other pixels
        identity = _joined([identity, pixels_hash(paths.base)])
    packed = None
    if wanted.packing == "best_fit":
        packed = write_packs(fresh, Split.open(fresh, "train").lengths(), wanted.max_length)
    manifest = _manifest(known, wanted, shared, found, bad, identity).model_copy(update={"packed": packed})
    assert manifest.balanced, f"rows are not accounted for: {manifest.to_json()}"
    manifest.write(fresh / paths.manifest.name)
    shutil.rmtree(paths.prepared, ignore_errors=True)
    fresh.rename(paths.prepared)
    shutil.rmtree(paths.preparing, ignore_errors=True)
    return manifest


def _refuse_empty(fates: Sequence[Array], bad: BadRows, wanted: PrepareDataParams) -> None:
    from tasks.data.assemble import SPLITS, WHY

    count = Counter[int]()
    for fate in fates:
        count.update(dict(enumerate(np.bincount(fate).tolist())))
    reasons = bad.reasons + Counter({why[0]: count[kind] for kind, why in WHY.items()})
    for name, said in (("train", "to train on"), ("validation", "held out")):
        if not count[SPLITS[name]]:
            left_out = ", ".join(f"{number} {reason}" for reason, number in sorted(reasons.items())) or "none"
            raise UserError(
                f"prepare_data.source={_name(wanted)} leaves no row {said} (left out: {left_out}); "
                "give more rows or change prepare_data.validation_fraction"
            )


def _give_rows(base: BaseModelRef, params: Params, paths: Paths) -> None:
    """Sees to it that the base has a row for every token of the data, and says what a method makes of new ones."""
    from tasks.data.chosen_template import ensure_template
    from tasks.data.prepared import Split
    from tasks.trainer.base_model import ensure_base, has_rows

    highest = max(Split.open(paths.prepared, name).highest_id() for name in ("train", "validation"))
    if not has_rows(base, highest):
        base = ensure_base(params.model, paths, highest)
        ensure_template(params, paths)
    train = params.train
    if base.added_tokens and train.finetuning_type != "full" and not train.lora.train_embeddings:
        say(
            f"train.finetuning_type={train.finetuning_type} trains no rows of the tables, so those of the "
            f"{base.added_tokens} added token(s) stay as they are and the layers learn around them; "
            "train.lora.train_embeddings: true trains them"
        )


def _manifest(
    known: Sequence[Known],
    wanted: PrepareDataParams,
    shared: Sequence[Shared],
    found: Assembled,
    bad: BadRows,
    identity: str,
) -> DataManifest:
    from tasks.data.store import histogram

    train, validation = found.splits["train"], found.splits["validation"]
    sources = [
        SourceCounts(
            name=one.source.name,
            format=one.form,
            weight=one.source.weight,
            rows_in=sum(shard.rows for shard in shared if shard.number == number),
            train_rows=tallies["train"].rows,
            validation_rows=tallies["validation"].rows,
            tokens=tallies["train"].tokens + tallies["validation"].tokens,
        )
        for number, (one, tallies) in enumerate(zip(known, found.sources, strict=True))
    ]
    return DataManifest(
        source=_name(wanted),
        source_fingerprint=_joined([one.fingerprint for one in known]),
        format=", ".join(dict.fromkeys(one.form for one in known)),
        content_hash=identity,
        max_length=wanted.max_length,
        rows_in=sum(source.rows_in for source in sources),
        train=train.counts,
        validation=validation.counts,
        truncated=train.truncated + validation.truncated,
        length_histogram=histogram(train, validation),
        rejected=dict(sorted((bad.reasons + found.left_out).items())),
        mended=dict(sorted(Counter(what for shard in shared for what in shard.mended()).items())),
        pieces=found.pieces + bad.pieces,
        repeated=found.repeated,
        unused=found.unused,
        pictures=found.pictures,
        sources=tuple(sources),
        leakage=found.leakage(wanted.near_duplicate_threshold),
    )


def main() -> None:
    stage_main("prepare_data", prepare_data)


if __name__ == "__main__":
    main()
