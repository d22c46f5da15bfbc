"""The base model and the prepared rows."""

from __future__ import annotations

from typing import Literal

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
    """One split. `target_tokens` are those the loss is taken on; `longest` is in tokens."""

    rows: Count
    tokens: Count
    target_tokens: Count
    longest: Count


class LengthBin(Contract):
    """Rows with at most `upper` tokens (and more than the bin before)."""

    upper: int
    rows: Count


class DataManifest(Contract):
    """What prepare_data made. rows_in = train.rows + validation.rows + sum(rejected.values())."""

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
