"""Reads what prepare_data wrote: one memory-mapped Arrow file a split."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tasks.errors import UserError

if TYPE_CHECKING:
    from tasks.data.row_prompt import Prompt

ALBUM = "images.arrow"  # beside the splits
IGNORED = -100  # the label of a token that is not learnt


@dataclass(frozen=True)
class StoredImage:
    """A picture of a row: `content` is a file (JPEG, PNG, WebP) of plain RGB or grey, `tasks.data.images.open_rgb`
    opens it. Width and height in pixels; `tokens` of input_ids stand for it. `number` is its own in data/prepared.
    """

    number: int
    width: int
    height: int
    tokens: int
    content: bytes


@dataclass(frozen=True)
class Split:
    """A split, row by row; nothing is copied until a row is asked for. `album`: the pictures of both splits."""

    table: pa.Table
    album: pa.Table | None = None

    @classmethod
    def open(cls, folder: Path, name: str) -> Split:
        """Opens `<folder>/<name>.arrow`.

        Raises:
            UserError: prepare_data has not written it.
        """
        path = folder / f"{name}.arrow"
        if not path.is_file():
            raise UserError(f"{path} is missing; run prepare_data first (`elastane run`)")
        album = folder / ALBUM
        return cls(_mapped(path), _mapped(album) if album.is_file() else None)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row, shape (rows,)."""
        chunks = self.table.column("input_ids").chunks
        return _joined([np.diff(chunk.offsets.to_numpy()) for chunk in chunks])

    def tokens(self, row: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(input_ids, labels) of `row`, each of shape (tokens,); a label of IGNORED is not learnt."""
        ids = np.asarray(self.table.column("input_ids")[row].values, dtype=np.int64)
        labels = np.asarray(self.table.column("labels")[row].values, dtype=np.int64)
        return ids, labels

    def highest_id(self) -> int:
        """The largest token id of all rows; -1 if there is none."""
        chunks = (chunk.flatten().to_numpy() for chunk in self.table.column("input_ids").chunks)
        return max((int(ids.max()) for ids in chunks if len(ids)), default=-1)

    def target_counts(self) -> NDArray[np.int64]:
        """Tokens of each row that the loss is taken on, shape (rows,).

        The first token of a row has nothing before it that could predict it, so it never counts.
        """
        counts = []
        for chunk in self.table.column("labels").chunks:
            lengths = np.diff(chunk.offsets.to_numpy())
            counts.append(target_counts(chunk.flatten().to_numpy() != IGNORED, lengths))
        return _joined(counts)

    def prompt(self, row: int) -> Prompt | None:
        """What the last answer follows; None for a plain text.

        Of a row with pictures a turn's content is a list of parts, or a text that has one image token a picture.
        """
        from tasks.data.row_prompt import Prompt

        return Prompt.read(self.table.column("prompt")[row].as_py())

    def reference(self, row: int) -> str:
        return str(self.table.column("reference")[row].as_py())

    def images(self, row: int) -> list[StoredImage]:
        """The pictures among `row`'s input_ids, in their order: each of them has its `tokens` there, together."""
        return [self._image(number) for number in self.image_numbers(row)]

    def prompt_images(self, row: int) -> list[StoredImage]:
        """The pictures of `row`'s prompt, in the order of their marks: those that were cut off included."""
        return [self._image(number) for number in self._numbers(row)]

    def image_numbers(self, row: int) -> list[int]:
        """The numbers of `images(row)`, without reading any."""
        return self._numbers(row)[: self.table.column("shown")[row].as_py()] if self.album is not None else []

    def image_sizes(self) -> NDArray[np.int64]:
        """Width, height and tokens of each picture by its number, shape (pictures, 3)."""
        if self.album is None:
            return np.zeros((0, 3), dtype=np.int64)
        columns = [self.album.column(name).to_numpy() for name in ("width", "height", "tokens")]
        return np.stack(columns, axis=1).astype(np.int64)

    def _numbers(self, row: int) -> list[int]:
        if self.album is None:
            return []
        numbers: list[int] = self.table.column("images")[row].as_py()
        return numbers

    def _image(self, number: int) -> StoredImage:
        assert self.album is not None
        values = (
            self.album.column(name)[number].as_py() for name in ("width", "height", "tokens", "content")
        )
        return StoredImage(number, *values)


def _mapped(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()


def target_counts(learnt: NDArray[np.bool_], lengths: NDArray[Any]) -> NDArray[np.int64]:
    """Tokens that the loss is taken on, shape (rows,): of each row the learnt ones, its first token aside.

    Args:
        learnt: of all tokens of all rows; lengths: of the rows, shape (rows,).
    """
    ends = np.cumsum(lengths)
    counted = learnt.copy()
    counted[(ends - lengths)[lengths > 0]] = False
    total = np.concatenate([[0], np.cumsum(counted, dtype=np.int64)])
    counts: NDArray[np.int64] = total[ends] - total[ends - lengths]
    return counts


def _joined(parts: list[NDArray[Any]]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts]).astype(np.int64)
