"""The base model and the prepared rows."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tasks.contracts.base import Contract, Count


class BaseModelRef(Contract):
    """The base model as prepare_data found it (`data/base/base.json`).

    `weights` is "here" when they were converted into `data/base/`, else "source": they stay where
    `name_or_path` says. `content_hash` covers the weights and the config as they are trained on (and the
    model's own code where it is run), `source_hash` the files they were made from (the same unless they
    were converted). `commit` is what `revision` of a hub id meant when it was fetched; None for all else.
    """

    name_or_path: str
    revision: str | None
    kind: Literal["builtin", "gguf", "folder", "hub"]
    weights: Literal["here", "source"]
    content_hash: str
    source_hash: str
    trust_remote_code: bool
    commit: str | None = None
    vocabulary: Count | None = None
    added_tokens: Count = 0


class SplitCounts(Contract):
    """One split. `target_tokens` are those the loss is taken on; `longest` is in tokens.

    `images` counts a picture as often as rows show it, and `image_tokens` are those of `tokens` that stand for them.
    """

    rows: Count
    tokens: Count
    target_tokens: Count
    longest: Count
    images: Count = 0
    image_tokens: Count = 0


class LengthBin(Contract):
    """Rows with at most `upper` tokens (and more than the bin before)."""

    upper: int
    rows: Count


class PackCounts(Contract):
    """Training rows packed into fewer of at most max_length tokens.

    `fill` is the share of packs x max_length that is tokens, `longest` the tokens that a micro-batch of the fullest
    pack has, `attended` those of the document that an average token is in. `content_hash` is of which rows are
    together.
    """

    packs: Count
    fill: float
    longest: Count
    attended: float
    content_hash: str


class SourceCounts(Contract):
    """What one source gave. `train_rows` count a row as often as an epoch sees it; tokens are those of both splits."""

    name: str
    format: str
    weight: float
    rows_in: Count
    train_rows: Count
    validation_rows: Count
    tokens: Count


class Leakage(Contract):
    """How much of what was to be held out repeats what is trained on, and was left out for it.

    `threshold`: the Jaccard similarity of two rows' word pairs from which on one repeats the other.
    `duplicates`: rows equal to an earlier one, of which none is left on either side.
    """

    threshold: float
    held_out: Count
    near_duplicates: Count
    duplicates: Count


class DataManifest(Contract):
    """What prepare_data made; every row is accounted for.

    rows_in + pieces + repeated = train.rows + validation.rows + unused + sum(rejected.values()), where `pieces` are
    the rows more that long texts were cut into, `repeated` the copies that a source's weight asks for, and `unused`
    the rows that are not in the share of a source that its weight takes. `mended`: rows that were repaired, by fault.
    `train` counts rows as they were encoded; `packed` says what is trained on where they were packed. `pictures`: the
    distinct ones in images.arrow.
    """

    source: str
    source_fingerprint: str
    format: str
    content_hash: str
    max_length: int
    rows_in: Count
    train: SplitCounts
    validation: SplitCounts
    truncated: Count
    length_histogram: tuple[LengthBin, ...]
    rejected: dict[str, int]
    mended: dict[str, int] = Field(default_factory=dict)
    pieces: Count = 0
    repeated: Count = 0
    unused: Count = 0
    pictures: Count = 0
    sources: tuple[SourceCounts, ...] = ()
    leakage: Leakage | None = None
    packed: PackCounts | None = None

    @property
    def balanced(self) -> bool:
        """Whether every row is accounted for."""
        kept = self.train.rows + self.validation.rows - self.repeated
        return self.rows_in + self.pieces == kept + self.unused + sum(self.rejected.values())

    @property
    def samples(self) -> int:
        """Rows that an epoch trains on: packs, where rows were packed."""
        return self.packed.packs if self.packed else self.train.rows
