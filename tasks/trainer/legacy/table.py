"""What a family's table holds, and the reader of its config.json. No torch here: the planner's command reads it too."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from tasks.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast


Change: TypeAlias = "Callable[[torch.Tensor], torch.Tensor] | None"
KEPT = "published"  # of a model with a class of this project: its published small files, beside the converted ones


@dataclass(frozen=True)
class Rule:
    """Where one published tensor goes. `{n}` is a layer's number.

    `rows` says how many of the source's first-dimension rows each target takes, in this order; empty for one target
    that takes all. `change` is applied to the whole source first, and keeps shape and dtype; `back` likewise to a
    source that is made of its targets again, where an export is written back.
    """

    source: str
    targets: tuple[str, ...]
    rows: tuple[int, ...] = ()
    change: Change = None
    back: Change = None


@dataclass(frozen=True)
class Native:
    """The same model for a class of transformers.

    `config` is for `AutoConfig.for_model`, `dropped` are published buffers that the class computes itself, `notes`
    are what the user should know of the conversion. `own`: the class is this project's, so nobody else can open what
    it saves, and exports are written back in the published layout; no rule has a `change` then.
    """

    config: Mapping[str, object]
    rules: tuple[Rule, ...]
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    own: bool = False


@dataclass(frozen=True)
class Settings:
    """A published config.json, and what else tells versions of a family apart.

    `name` is what the user calls the model, `tokenizer_config` its tokenizer_config.json (empty where unread).
    """

    values: Mapping[str, object]
    name: str
    tokenizer_config: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, name: str) -> Settings:
        """Raises UserError: a file is no JSON object."""
        tokenizer = folder / "tokenizer_config.json"
        return cls(
            read_object(folder / "config.json"), name, read_object(tokenizer) if tokenizer.is_file() else {}
        )

    def count(self, key: str, default: int | None = None) -> int:
        """A positive whole number. Raises UserError: it is none, or is left out without a default."""
        value = self.values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refused(key, "must be a positive whole number", "mend the model's config.json")
        return value

    def number(self, key: str, default: float) -> float:
        """A positive number. Raises UserError: it is none."""
        value = self.values.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise self.refused(key, "must be a positive number", "mend the model's config.json")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.refused(key, "must be true or false", "mend the model's config.json")
        return value

    def only(self, why: str, **allowed: object) -> None:
        """Raises UserError: a key is there with another value than the one that can be converted."""
        for key, value in allowed.items():
            if self.values.get(key, value) != value:
                raise self.refused(key, f"cannot be converted ({why}; only {json.dumps(value)} can)")

    def without(self, why: str, *keys: str) -> None:
        """Raises UserError: a key is there and neither null, false, 0 nor empty."""
        for key in keys:
            if self.values.get(key):
                raise self.refused(key, f"cannot be converted ({why})")

    def refused(self, key: str, rule: str, way_out: str = "take another model") -> UserError:
        said = json.dumps(self.values[key]) if key in self.values else "left out"
        return UserError(f"config.json of {self.name}: {key} is {said[:80]} and {rule}; {way_out}")


@dataclass(frozen=True)
class Family:
    """One `model_type` that transformers has no class for.

    `native` maps config and weights; `tokenizer` builds the fast tokenizer with its chat template from a folder;
    `ends` gives the ids that end an answer, for generation_config.json; `reads` are globs of the tokenizer's files.
    """

    model_type: str
    native: Callable[[Settings], Native]
    tokenizer: Callable[[Path, Settings], PreTrainedTokenizerFast]
    ends: Callable[[PreTrainedTokenizerFast], list[int]]
    reads: tuple[str, ...]


def read_object(file: Path) -> dict[str, object]:
    """Raises UserError: the file is no JSON object."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}); mend the model's files") from None
    if not isinstance(values, dict):
        raise UserError(f"{file} is no JSON object; mend the model's files")
    return values
