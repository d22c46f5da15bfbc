"""Reads what prepare_data wrote: one memory-mapped Arrow file a split."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tasks.errors import UserError


@dataclass(frozen=True)
class Split:
    """A split, row by row; nothing is copied until a row is asked for."""

    table: pa.Table

    @classmethod
    def open(cls, folder: Path, name: str) -> Split:
        """Opens `<folder>/<name>.arrow`.

        Raises:
            UserError: prepare_data has not written it.
        """
        path = folder / f"{name}.arrow"
        if not path.is_file():
            raise UserError(f"{path} is missing; run prepare_data first (`elastane run`)")
        with pa.memory_map(str(path)) as source:
            return cls(pa.ipc.open_file(source).read_all())

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row, shape (rows,)."""
        column = self.table.column("input_ids").combine_chunks()
        return np.diff(column.offsets.to_numpy()).astype(np.int64)

    def tokens(self, row: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(input_ids, labels) of `row`, each of shape (tokens,); a label of -100 is not learnt."""
        ids = np.asarray(self.table.column("input_ids")[row].values, dtype=np.int64)
        labels = np.asarray(self.table.column("labels")[row].values, dtype=np.int64)
        return ids, labels

    def target_counts(self) -> NDArray[np.int64]:
        """Tokens of each row that the loss is taken on, shape (rows,).

        The first token of a row has nothing before it that could predict it, so it never counts.
        """
        column = self.table.column("labels").combine_chunks()
        flat = column.values.to_numpy() != -100
        offsets = column.offsets.to_numpy()
        flat = flat.copy()
        flat[offsets[:-1][np.diff(offsets) > 0]] = False
        sums = np.concatenate([[0], np.cumsum(flat)])
        return (sums[offsets[1:]] - sums[offsets[:-1]]).astype(np.int64)

    def prompt(self, row: int) -> list[dict[str, str]]:
        """The messages before the last answer, as `apply_chat_template` takes them."""
        messages: list[dict[str, str]] = json.loads(self.table.column("prompt")[row].as_py())
        return messages

    def reference(self, row: int) -> str:
        return str(self.table.column("reference")[row].as_py())
