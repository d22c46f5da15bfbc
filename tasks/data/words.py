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
from itertools import accumulate, chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from tasks.data.cutting import Cutter, cutter_of

REMEMBERED = 200_000  # words, some 40 MB
PROBES = (
    "It's 12345 o'clock,  isn't IT'S?\n\n  Yes!!\t(a_b) {x:1.5e-3}\r\n \n  end  ",
    "def f(x):\n    return x**2  # 'quoted' \"text\"\n\n\n",
    " leading, trailing ",
    "\x00\x1c\x7f a\x0bb\x0cc",
    "Grüße — «你好», 世界！ \u00a0ﬁn \u2028 نص 🦜🏽 e\u0301",
)


class WordTokens:
    """A text's tokens, shape (tokens,) int32, with the borders of its words in characters and in tokens."""

    def __init__(self, owner: Words, words: list[str], heads: list[int], ids: list[tuple[int, ...]]) -> None:
        """
        Args:
            heads: the words that begin with a character that the tokenizer put there.
        """
        self._owner, self._words, self._heads = owner, words, heads
        lengths = list(map(len, words))
        for head in heads:
            lengths[head] -= 1
        self._chars = list(accumulate(lengths))
        self._tokens = list(accumulate(map(len, ids)))
        count = self._tokens[-1] if ids else 0
        self.ids: NDArray[np.int32] = np.fromiter(chain.from_iterable(ids), np.int32, count)

    def covers(self, chars: int) -> bool:
        """Whether the words are a text of `chars` characters, with no gap."""
        return (self._chars[-1] if self._chars else 0) == chars

    def ending_by(self, char: int) -> int:
        """How many tokens end at or before the character `char`."""
        word = bisect_right(self._chars, char)
        before, start = self._before(word)
        if word == len(self._words) or start == char:
            return before
        return before + sum(end <= char - start for _, end in self._offsets(word))

    def starting_before(self, char: int) -> int:
        """How many tokens begin before the character `char`."""
        word = bisect_left(self._chars, char)
        if word < len(self._words) and self._chars[word] == char:
            return self._tokens[word]
        before, start = self._before(word)
        if word == len(self._words):
            return before
        return before + sum(begin < char - start for begin, _ in self._offsets(word))

    def whole(self, tokens: int) -> int:
        """The largest number of tokens, at most `tokens`, that ends with a whole character."""
        word = bisect_left(self._tokens, tokens)
        if word == len(self._words) or self._tokens[word] == tokens or self._words[word].isascii():
            return tokens
        before, _ = self._before(word)
        return before + whole(self._offsets(word), tokens - before)

    def chars(self, tokens: int) -> int:
        """How many characters the first `tokens` tokens stand for, half ones left out."""
        kept = self.whole(min(tokens, len(self.ids)))
        word = bisect_right(self._tokens, kept)
        before, start = self._before(word)
        return start if kept == before else start + self._offsets(word)[kept - before][0]

    def _before(self, word: int) -> tuple[int, int]:
        return (self._tokens[word - 1], self._chars[word - 1]) if word else (0, 0)

    def _offsets(self, word: int) -> list[tuple[int, int]]:
        found = self._owner.offsets(self._words[word])
        if word not in self._heads:
            return found
        # The character before the text counts to the text's first, as in the library.
        return [(max(begin - 1, 0), max(end - 1, 1)) for begin, end in found]


def whole(offsets: Sequence[tuple[int, int]], tokens: int) -> int:
    """At most `tokens`, moved back to where no character is cut; `offsets`: (begin, end) in characters a token."""
    while 0 < tokens < len(offsets) and offsets[tokens][0] < offsets[tokens - 1][1]:
        tokens -= 1
    return tokens


class _Remembered(dict[str, tuple[int, ...]]):
    """Word -> ids, asked of the library where it is new."""

    def __init__(self, cutter: Cutter) -> None:
        super().__init__()
        self._cutter = cutter

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = self._cutter.ids(word)
        if len(self) >= REMEMBERED:
            self.clear()
        self[word] = ids
        return ids


class Words:
    """A tokenizer's ids, word by word."""

    def __init__(self, cutter: Cutter, added: dict[str, int]) -> None:
        """
        Args:
            added: tokens that are taken out of a text whole, with their ids.
        """
        self._cutter = cutter
        self._ids = _Remembered(cutter)
        self._whole = {token: (number,) for token, number in added.items()}
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
            mine = words.encode(text)
            if mine is not None and mine.ids.tolist() != backend.encode(text, add_special_tokens=False).ids:
                return None
        return words

    def encode(self, text: str) -> WordTokens | None:
        """None where only the library's own way is known to be right."""
        ascii_alone = text.isascii()
        if not ascii_alone and not self._cutter.plain(text):
            return None
        words: list[str] = []
        heads: list[int] = []
        ids: list[tuple[int, ...]] = []
        for number, part in enumerate(self._added.split(text) if self._added else [text]):
            if number % 2:
                words.append(part)
                ids.append(self._whole[part])
            elif part:
                cut, headed = self._cutter.cut(part, number == 0, ascii_alone)
                if headed:
                    heads.append(len(words))
                words += cut
                ids += map(self._ids.__getitem__, cut)
        found = WordTokens(self, words, heads, ids)
        return found if found.covers(len(text)) else None

    def offsets(self, word: str) -> list[tuple[int, int]]:
        """(begin, end) in characters of each of the word's tokens."""
        return [(0, len(word))] if word in self._whole else self._cutter.offsets(word)
