"""Token ids word by word: each word of a text is encoded once, by the library, and remembered.

A byte-pair model never joins across the borders between words (`cutting.py` says where these are), so a text's ids are
its words' ids in a row. The library looks for words and merges anew every time; here a regular expression cuts and a
table answers, several times as fast. What is not known to come out the same (another kind of tokenizer, a character
that the two cut differently) is left to the library.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from tasks.data.cutting import Cutter, cutter_of
from tasks.data.known_words import Known

PROBES = (
    "It's 12345 o'clock,  isn't IT'S?\n\n  Yes!!\t(a_b) {x:1.5e-3}\r\n \n  end  ",
    "def f(x):\n    return x**2  # 'quoted' \"text\"\n\n\n",
    " leading, trailing ",
    "\x00\x1c\x7f a\x0bb\x0cc",
    "Grüße — «你好», 世界！ \u00a0ﬁn \u2028 نص 🦜🏽 e\u0301",
)


@dataclass(frozen=True)
class _Cut:
    """Texts as words or phrases, one text behind another: where each ends in characters and in tokens."""

    known: Known
    numbers: list[int]
    chars: list[int]
    tokens: list[int]
    ids: NDArray[np.int32]

    @classmethod
    def of(cls, known: Known, numbers: list[int]) -> _Cut:
        wanted = np.array(numbers, np.int64)
        ids, counts = known.ids(wanted)
        chars, tokens = np.cumsum(known.chars(wanted)), np.cumsum(counts)
        return cls(known, numbers, chars.tolist(), tokens.tolist(), ids)


class WordTokens:
    """A text's tokens, shape (tokens,) int32, with the borders of its words in characters and in tokens."""

    def __init__(self, cut: _Cut, first: int, behind: int) -> None:
        """
        Args:
            first, behind: which of the words are the text's.
        """
        self._cut, self._first, self._behind = cut, first, behind
        self._char, self._token = (cut.chars[first - 1], cut.tokens[first - 1]) if first else (0, 0)
        self.ids: NDArray[np.int32] = cut.ids[self._token : cut.tokens[behind - 1] if behind else 0]

    def covers(self, chars: int) -> bool:
        """Whether the words are a text of `chars` characters, with no gap."""
        return (self._cut.chars[self._behind - 1] - self._char if self._behind > self._first else 0) == chars

    def ending_by(self, char: int) -> int:
        """How many tokens end at or before the character `char`."""
        word = bisect_right(self._cut.chars, self._char + char, self._first, self._behind)
        before, start = self._before(word)
        if word == self._behind or start == char:
            return before
        return before + sum(end <= char - start for _, end in self._offsets(word))

    def starting_before(self, char: int) -> int:
        """How many tokens begin before the character `char`."""
        word = bisect_left(self._cut.chars, self._char + char, self._first, self._behind)
        if word < self._behind and self._cut.chars[word] == self._char + char:
            return self._cut.tokens[word] - self._token
        before, start = self._before(word)
        if word == self._behind:
            return before
        return before + sum(begin < char - start for begin, _ in self._offsets(word))

    def whole(self, tokens: int) -> int:
        """The largest number of tokens, at most `tokens`, that ends with a whole character."""
        word = bisect_left(self._cut.tokens, self._token + tokens, self._first, self._behind)
        if word == self._behind or self._cut.tokens[word] == self._token + tokens:
            return tokens
        before, _ = self._before(word)
        return before + whole(self._offsets(word), tokens - before)

    def chars(self, tokens: int) -> int:
        """How many characters the first `tokens` tokens stand for, half ones left out."""
        kept = self.whole(min(tokens, len(self.ids)))
        word = bisect_right(self._cut.tokens, self._token + kept, self._first, self._behind)
        before, start = self._before(word)
        return start if kept == before else start + self._offsets(word)[kept - before][0]

    def _before(self, word: int) -> tuple[int, int]:
        """Tokens and characters before it."""
        if word == self._first:
            return 0, 0
        return self._cut.tokens[word - 1] - self._token, self._cut.chars[word - 1] - self._char

    def _offsets(self, word: int) -> list[tuple[int, int]]:
        return self._cut.known.offsets(self._cut.numbers[word])


def whole(offsets: Sequence[tuple[int, int]], tokens: int) -> int:
    """At most `tokens`, moved back to where no character is cut; `offsets`: (begin, end) in characters a token."""
    while 0 < tokens < len(offsets) and offsets[tokens][0] < offsets[tokens - 1][1]:
        tokens -= 1
    return tokens


class Words:
    """A tokenizer's ids, word by word."""

    def __init__(self, cutter: Cutter, added: dict[str, int]) -> None:
        """
        Args:
            added: tokens that are taken out of a text whole, with their ids.
        """
        self._cutter, self._tokens = cutter, added
        self._known = Known(cutter, added)
        longest_first = sorted(added, key=len, reverse=True)
        self._added = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if added else None

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Words | None:
        """None where the tokenizer is of another kind, or gives other ids for the probes."""
        backend: Any = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        added = tokenizer.added_tokens_decoder
        cutter = cutter_of(backend, {token.content for token in added.values()}) if backend else None
        if cutter is None:
            return None
        if any(token.lstrip or token.rstrip or token.single_word for token in added.values()):
            return None
        if len({token.normalized for token in added.values()}) > 1:
            return None  # they are looked for one kind after the other
        words = cls(cutter, {token.content: number for number, token in added.items() if token.content})
        texts = [*PROBES, "".join(f" a{token.content}b {token.content}" for token in added.values())]
        for text in texts:
            mine = words.encode([text])[0]
            if mine is not None and mine.ids.tolist() != backend.encode(text, add_special_tokens=False).ids:
                return None
        return words

    def encode(self, texts: Sequence[str]) -> list[WordTokens | None]:
        """None in the place of a text for which only the library's own way is known to be right."""
        if self._known.full:
            self._known = Known(self._cutter, self._tokens)
        numbers: list[int] = []
        met: dict[str, list[int]] = {}
        bounds = [0]
        for text in texts:
            ascii_alone = text.isascii()
            if ascii_alone or self._cutter.plain(text):
                numbers += self._numbers(text, ascii_alone, met)
            bounds.append(len(numbers))
        cut = _Cut.of(self._known, numbers)
        found = [WordTokens(cut, first, behind) for first, behind in pairwise(bounds)]
        return [one if one.covers(len(text)) else None for one, text in zip(found, texts, strict=True)]

    def _numbers(self, text: str, ascii_alone: bool, met: dict[str, list[int]]) -> list[int]:
        """Those of the text's words; `met`: those of stretches behind an added token, which often come again."""
        numbers: list[int] = []
        for place, part in enumerate(self._added.split(text) if self._added else [text]):
            if place % 2:
                numbers.append(self._known.whole[part])
            elif part:
                found = met.get(part) if place else None
                if found is None:
                    found = self._known.stretch(part, place == 0, ascii_alone)
                    if place:
                        met[part] = found
                numbers += found
        return numbers
