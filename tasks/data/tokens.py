"""Texts -> the tokenizer's own ids, with the characters they stand for, the fastest way there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from tasks.data.words import Words

HALF = "\ufffd"  # what half a character is decoded to


class Tokens(Protocol):
    """A text's tokens: `ids` of shape (tokens,), int32."""

    ids: NDArray[np.int32]

    def ending_by(self, char: int) -> int:
        """How many tokens end at or before the character `char`."""

    def starting_before(self, char: int) -> int:
        """How many tokens begin before the character `char`."""

    def whole(self, tokens: int) -> int:
        """The largest number of tokens, at most `tokens`, that ends with a whole character."""

    def chars(self, tokens: int) -> int:
        """How many characters the first `tokens` tokens stand for, half ones left out."""


class LibraryTokens:
    """As the library encodes it; offsets are asked for where a border is alone."""

    def __init__(self, encoding: Any, chars: int) -> None:
        self._encoding, self._chars = encoding, chars
        self.ids: NDArray[np.int32] = np.array(encoding.ids, dtype=np.int32)

    def ending_by(self, char: int) -> int:
        # Some tokenizers count a word's blank to no token.
        for place in range(char, self._chars):
            token = self._encoding.char_to_token(place)
            if token is not None:
                return int(token)
        return len(self.ids)

    def starting_before(self, char: int) -> int:
        token = self.ending_by(char)
        while token < len(self.ids) and self._offsets(token)[0] < char:
            token += 1
        return token

    def whole(self, tokens: int) -> int:
        while 0 < tokens < len(self.ids) and self._offsets(tokens)[0] < self._offsets(tokens - 1)[1]:
            tokens -= 1
        return tokens

    def chars(self, tokens: int) -> int:
        kept = self.whole(min(tokens, len(self.ids)))
        return self._chars if kept == len(self.ids) else self._offsets(kept)[0]

    def _offsets(self, token: int) -> tuple[int, int]:
        found: tuple[int, int] | None = self._encoding.token_to_chars(token)
        return found or (0, 0)


class PlainTokens:
    """Of a tokenizer in Python, which tells no offsets: a border is where the ids of the text's beginning part ways."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
        self._tokenizer, self._text = tokenizer, text
        self._all = self._encode(text)
        self.ids: NDArray[np.int32] = np.array(self._all, dtype=np.int32)

    def ending_by(self, char: int) -> int:
        beginning = self._encode(self._text[:char])
        pairs = zip(beginning, self._all, strict=False)
        return next((place for place, (one, other) in enumerate(pairs) if one != other), len(beginning))

    def starting_before(self, char: int) -> int:
        beginning = self._encode(self._text[:char])
        shared = self.ending_by(char)
        return min(shared + (shared < len(beginning)), len(self._all))

    def whole(self, tokens: int) -> int:
        while 0 < tokens < len(self._all) and str(self._tokenizer.decode(self._all[:tokens])).endswith(HALF):
            tokens -= 1
        return tokens

    def chars(self, tokens: int) -> int:
        low, high = 0, len(self._text)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.starting_before(middle) <= tokens else (low, middle - 1)
        return low

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


class JoinedTokens:
    """Two texts' tokens one behind the other."""

    def __init__(self, one: Tokens, chars: int, other: Tokens, skipped: int, left_out: int) -> None:
        """
        Args:
            chars: characters of `one`.
            skipped, left_out: characters and tokens at the beginning of `other` that are not taken.
        """
        self._one, self._chars, self._other = one, chars, other
        self._skipped, self._left_out, self._first = skipped, left_out, len(one.ids)
        self.ids: NDArray[np.int32] = np.concatenate([one.ids, other.ids[left_out:]])

    def ending_by(self, char: int) -> int:
        if char < self._chars:
            return self._one.ending_by(char)
        return self._first + self._other.ending_by(char - self._chars + self._skipped) - self._left_out

    def starting_before(self, char: int) -> int:
        if char <= self._chars:
            return self._one.starting_before(char)
        return self._first + self._other.starting_before(char - self._chars + self._skipped) - self._left_out

    def whole(self, tokens: int) -> int:
        if tokens <= self._first:
            return self._one.whole(tokens)
        return self._first + self._other.whole(tokens - self._first + self._left_out) - self._left_out

    def chars(self, tokens: int) -> int:
        if tokens <= self._first:
            return self._one.chars(tokens)
        return self._chars + self._other.chars(tokens - self._first + self._left_out) - self._skipped


class Tokeniser:
    """Encodes texts without adding tokens of its own to them.

    Set TOKENIZERS_PARALLELISM=false where several processes share the cores.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        self._words: Words | None = None
        if self._backend is not None:
            # A tokenizer.json may say that texts are to be cut or padded, which the caller does.
            self._backend.no_truncation()
            self._backend.no_padding()
            self._words = Words.of(tokenizer)

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of each text, in their order."""
        if self._backend is None:
            return [PlainTokens(self._tokenizer, text) for text in texts]
        found: list[Tokens | None] = [*self._words.encode(texts)] if self._words else [None] * len(texts)
        left = [number for number, tokens in enumerate(found) if tokens is None]
        if left:
            encodings = self._backend.encode_batch(
                [texts[number] for number in left], add_special_tokens=False
            )
            for number, encoding in zip(left, encodings, strict=True):
                found[number] = LibraryTokens(encoding, len(texts[number]))
        return [tokens for tokens in found if tokens is not None]

    def parted(self, text: str, border: int, tokens: Tokens) -> Tokens:
        """`tokens` of `text`, or others, so that none reaches over the character `border`.

        The part behind it is encoded as the middle of a text: behind a line's end, since some tokenizers put a blank
        before what they take for a beginning.
        """
        if tokens.ending_by(border) == tokens.starting_before(border):
            return tokens
        one, plain, behind = self.encode([text[:border], text[border:], "\n" + text[border:]])
        for other, skipped in ((plain, 0), (behind, 1)):
            left_out = other.ending_by(skipped)
            joined = JoinedTokens(one, border, other, skipped, left_out)
            if other.starting_before(skipped) == left_out and self._decoded(joined) == text:
                return joined
        return tokens

    def _decoded(self, tokens: Tokens) -> str:
        text = self._tokenizer.decode(tokens.ids.tolist(), clean_up_tokenization_spaces=False)
        return str(text)
