"""A tokenizer's words, phrases and added tokens by number, each encoded once.

A phrase is what stands between two blanks, with the blank before it, and ends behind a line's end. Few texts need be
cut further, since most phrases were met before.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.data.cutting import Cutter

Array = NDArray[Any]

REMEMBERED = 200_000  # words and phrases, some 60 MB
LONGEST = 64  # characters of a phrase: what is longer is hardly met again
ODD = -1  # a phrase that may be cut otherwise beside others


class _Numbers(dict[str, int]):
    """Text -> its number, given where it is new."""

    def __init__(self, give: Callable[[str], int]) -> None:
        super().__init__()
        self._give = give

    def __missing__(self, text: str) -> int:
        number = self._give(text)
        if number != ODD:
            self[text] = number
        return number


class Known:
    """What is known so far: characters and ids by number."""

    def __init__(self, cutter: Cutter, added: dict[str, int]) -> None:
        self._cutter, self._added = cutter, len(added)
        self.texts: list[str] = []
        self._chars, self._ids, self._ends = array("i"), array("i"), array("q", [0])
        self.whole = {token: self._add(token, len(token), (number,)) for token, number in added.items()}
        self.words = _Numbers(lambda word: self._add(word, len(word), cutter.ids(word)))
        # Words whose first character is not the text's.
        self.headed = _Numbers(lambda word: self._add(word, len(word) - 1, cutter.ids(word)))
        self.phrases = _Numbers(lambda phrase: self._phrase(phrase, phrase.removeprefix(" ")))
        self.firsts = _Numbers(lambda phrase: self._phrase(phrase, phrase.lstrip()))
        self.alone = _Numbers(lambda phrase: self._phrase(phrase, "alone"))

    @property
    def full(self) -> bool:
        return len(self.texts) >= REMEMBERED

    def stretch(self, text: str, first: bool, ascii_alone: bool) -> list[int]:
        """The numbers of what a text between added tokens is made of; `first`: nothing stands before it."""
        if self._cutter.phrased:
            found = self._phrased(text)
            if found is not None:
                return found
        cut, headed = self._cutter.cut(text, first, ascii_alone)
        if headed:
            return [self.headed[cut[0]], *map(self.words.__getitem__, cut[1:])]
        return list(map(self.words.__getitem__, cut))

    def chars(self, numbers: Array) -> Array:
        """Characters of each, shape (numbers,)."""
        return np.frombuffer(self._chars, np.int32)[numbers]

    def ids(self, numbers: Array) -> tuple[Array, Array]:
        """(ids one after another, int32; how many each has, shape (numbers,))."""
        ends = np.frombuffer(self._ends, np.int64)
        starts, counts = ends[numbers], ends[numbers + 1] - ends[numbers]
        before = np.cumsum(counts) - counts
        places = np.arange(int(counts.sum())) + np.repeat(starts - before, counts)
        return np.frombuffer(self._ids, np.int32)[places], counts

    def offsets(self, number: int) -> list[tuple[int, int]]:
        """(begin, end) in characters of each token."""
        text = self.texts[number]
        if number < self._added:
            return [(0, len(text))]
        found = self._cutter.offsets(text)
        if self._chars[number] == len(text):
            return found
        # The character before the text counts to the text's first, as in the library.
        return [(max(begin - 1, 0), max(end - 1, 1)) for begin, end in found]

    def _phrased(self, text: str) -> list[int] | None:
        """The numbers of its phrases, None where blanks or line ends stand beside others."""
        if "\0" in text:
            return None
        body = text.lstrip()
        phrases = body.replace(" ", "\0 ").replace("\n", "\n\0").split("\0")
        if len(body) < len(text):
            phrases[0] = text[: len(text) - len(body)] + phrases[0]
        if not phrases[-1]:
            phrases.pop()
        if len(phrases) == 1:
            found = [self.alone[text]]
        else:
            found = list(map(self.phrases.__getitem__, phrases[1:]))
            found.insert(0, self.firsts[phrases[0]])
        return None if ODD in found else found

    def _phrase(self, phrase: str, core: str) -> int:
        """Its number, ODD where the edges of its core are not words' edges whatever stands beside it."""
        core = core.removesuffix("\n")
        if not core or core[0].isspace() or core[-1].isspace() or len(phrase) > LONGEST:
            return ODD
        words, _ = self._cutter.cut(phrase, False, phrase.isascii())
        return self._add(phrase, len(phrase), [token for word in words for token in self._ids_of(word)])

    def _ids_of(self, word: str) -> array[int]:
        number = self.words[word]
        return self._ids[self._ends[number] : self._ends[number + 1]]

    def _add(self, text: str, chars: int, ids: Iterable[int]) -> int:
        self.texts.append(text)
        self._chars.append(chars)
        self._ids.extend(ids)
        self._ends.append(len(self._ids))
        return len(self.texts) - 1
