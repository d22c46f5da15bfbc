"""Tokens of prepared rows that a model's tables lack: rows are added before anything is trained.

Only then: many a tokenizer has a token that no text holds (for padding, for images). A row that is added is the mean
of the model's own, so the same on every machine and a likely word to none.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tasks.contracts import write_text
from tasks.errors import UserError
from tasks.stage import lively
from tasks.trainer.legacy.checkpoint import SHARD_BYTES, Writer, tensors, weight_files

CHUNK = 4096  # rows summed at once


@dataclass(frozen=True)
class Missing:
    """Tokens behind the last row: the tables have `rows` of the `wanted`, and `tokens` are those that are new."""

    rows: int
    wanted: int
    tokens: tuple[str, ...]


def table_rows(folder: Path) -> int | None:
    """Rows of the embedding table, as the config says; None where it says none."""
    holder = _holder(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    return holder["vocab_size"] if holder else None


def missing_rows(folder: Path, trust_remote_code: bool) -> Missing | None:
    """What the tokenizer in `folder` has beyond the rows that its config names; None where nothing is."""
    rows = table_rows(folder)
    if rows is None:
        return None
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    beyond = {number: token for token, number in tokenizer.get_vocab().items() if number >= rows}
    if not beyond:
        return None
    return Missing(rows, max(beyond) + 1, tuple(beyond[number] for number in sorted(beyond)))


def widen(source: Path, folder: Path, missing: Missing, trust_remote_code: bool, name: str) -> None:
    """Writes the weights in `source` into `folder` with more rows, a tensor at a time, and the config's new number.

    Args:
        folder: holds the config already; may be `source` itself.
        name: what the user calls the model.

    Raises:
        UserError: a table is not found in the weights.
    """
    changed = _changed(folder, missing, trust_remote_code)
    found: set[int] = set()
    writer, files = Writer(folder, SHARD_BYTES), weight_files(source)
    size = sum(file.stat().st_size for file in files)
    with tqdm(total=size, unit="B", unit_scale=True, desc="adding rows", mininterval=0.5) as bar, lively(bar):
        for file in files:
            for stored, tensor in tensors(file):
                table = next((key for key in changed if _same(stored, key)), None)
                if table is not None and tensor.shape[0] == missing.rows:
                    found.add(changed[table])
                    tensor = _with_means(tensor, missing.wanted)  # noqa: PLW2901
                writer.add(stored, tensor)
                bar.update(tensor.nbytes)
    lost = sorted(key for key, number in changed.items() if number not in found)
    if lost:
        raise UserError(
            f"{name}: its tokenizer has {missing.wanted} tokens and its tables {missing.rows} rows, and no rows can be "
            f"added since {lost[0]} is not among its weights; give a model that was resized for its tokenizer"
        )
    for file in {*files, *folder.glob("*.index.json")}:
        if file.parent == folder:
            file.unlink()
    writer.finish()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    _holder(config)["vocab_size"] = missing.wanted
    write_text(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")


def _holder(config: dict[str, Any]) -> Any:
    """The part of a config that holds `vocab_size`."""
    return next((part for part in (config, config.get("text_config") or {}) if "vocab_size" in part), None)


def _changed(folder: Path, missing: Missing, trust_remote_code: bool) -> dict[str, int]:
    """Weights whose rows are tokens -> a number that those have in common which are tied."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    wider = copy.deepcopy(config)
    wider.get_text_config().vocab_size = missing.wanted
    with torch.device("meta"):
        models = [
            AutoModelForCausalLM.from_config(each, trust_remote_code=trust_remote_code)
            for each in (config, wider)
        ]
    before, after = (dict(model.named_parameters(remove_duplicate=False)) for model in models)
    return {key: id(weight) for key, weight in before.items() if weight.shape != after[key].shape}


def _same(stored: str, key: str) -> bool:
    """Checkpoints may leave out, or add, a prefix of the class."""
    return stored == key or stored.endswith(f".{key}") or key.endswith(f".{stored}")


def _with_means(table: torch.Tensor, rows: int) -> torch.Tensor:
    """The table (vocabulary, ...) with its mean row repeated up to `rows`.

    numpy adds row after row in float64, so that threads and vector units of a machine change nothing.
    """
    total = np.zeros(table.shape[1:])
    for chunk in table.split(CHUNK):
        total = np.add.reduce(np.concatenate([total[None], chunk.double().numpy()]), axis=0)
    mean = torch.from_numpy(np.asarray(total / len(table))).to(table.dtype)
    return torch.cat([table, mean.expand(rows - len(table), *table.shape[1:])])
