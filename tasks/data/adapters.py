"""Today's encoder behind the name that the pipeline uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tasks.data.rows import BadRow, Row
from tasks.data.templates import Encoded, encode, load_tokenizer
from tasks.params import Params
from tasks.paths import Paths


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
