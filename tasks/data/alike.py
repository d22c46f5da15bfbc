"""Rows that say nearly the same: the exact Jaccard similarity of word pairs, found through rare pairs.

Sets that are at least t alike share at least ceil(t |x|) pairs. With the pairs of every set sorted in one order,
they then share l of the first |x| - ceil(t |x|) + l (Bayardo, Ma, Srikant 2007; l > 1: Wang, Li, Feng 2012).
Sorted from rare to common, few other sets share those, whatever phrases the rows have in common.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.data.rows import Row

# A letter of a script that is written without spaces counts as a word.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")
ASCII = bytes(
    ord(chr(code).lower()) if chr(code).isalnum() or code == 95 else 32 for code in range(128)
) + bytes(128)
SHARED = 2  # l above
KNOWN_WORDS = 200_000
PAIRS_AT_ONCE = 1 << 21  # bounds the memory of one comparison
ARRAYS = ("pairs", "ranks", "sizes", "tokens", "starts", "rows", "slots")

Array = NDArray[Any]


class _Hashes(dict[str | bytes, int]):
    """64-bit hashes of words, kept while there are not too many."""

    def __missing__(self, word: str | bytes) -> int:
        if len(self) >= KNOWN_WORDS:
            self.clear()
        text = word.encode("utf-8", "surrogatepass") if isinstance(word, str) else word
        found = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        self[word] = found
        return found


def _words(row: Row) -> Sequence[str | bytes]:
    text = " ".join(text for role, text in row.messages if role != "system")
    if text.isascii():  # the same words, several times as fast
        return text.encode().translate(ASCII).split()
    return WORD.findall(text.lower())


def _pictures(row: Row) -> int:
    """A number that changes with the row's pictures: of other pictures the same words say something else."""
    if not row.pictures:
        return 0
    shown = b"".join(picture.identity for picture in row.pictures)
    return int.from_bytes(hashlib.blake2b(shown, digest_size=8).digest(), "little")


_HASHES = _Hashes()


def word_pairs(rows: Sequence[Row]) -> tuple[Array, Array]:
    """Hashes of the pairs of neighbouring words of each row, case, punctuation and system turns aside.

    A row of one word has that word. Returns (pairs of all rows, uint32; number of each row's, shape (rows,)), each
    row's sorted and without repetition. Two of a row's pairs are taken for one in 1 of 2^32 cases.
    """
    words = [_words(row) for row in rows]
    counts = np.array([len(one) for one in words], dtype=np.int64)
    flat = np.fromiter(map(_HASHES.__getitem__, chain.from_iterable(words)), np.uint64, int(counts.sum()))
    last = np.cumsum(counts) - 1
    follower = np.zeros_like(flat)
    follower[:-1] = flat[1:]
    follower[last[counts == 1]] = 0
    wanted = np.ones(len(flat), dtype=bool)
    wanted[last[counts > 1]] = False
    with np.errstate(over="ignore"):
        mixed = (flat * np.uint64(0x9E3779B97F4A7C15) + follower) * np.uint64(0xD6E8FEB86659FD93)
    mixed ^= np.repeat(np.array([_pictures(row) for row in rows], dtype=np.uint64), counts)
    row = np.repeat(np.arange(len(rows), dtype=np.uint64), counts)
    keys = np.sort((row << np.uint64(32) | mixed >> np.uint64(32))[wanted])
    keys = keys[np.diff(keys, prepend=np.uint64(2**64 - 1)) != 0]
    sizes = np.bincount((keys >> np.uint64(32)).astype(np.int64), minlength=len(rows))
    return keys.astype(np.uint32), sizes.astype(np.int64)


@dataclass(frozen=True)
class Index:
    """Sets of word pairs that others are compared with.

    A pair's rank says how rare it is among the indexed sets; `tokens` are the ranks of each set in rising order.
    `rows[starts[r]:starts[r + 1]]` are the sets that have the pair of rank r among their first ones.
    `pairs[slots[b]:slots[b + 1]]` are those whose first bits are b.
    """

    threshold: float
    pairs: Array
    ranks: Array
    sizes: Array
    tokens: Array
    starts: Array
    rows: Array
    slots: Array

    @classmethod
    def of(cls, pairs: Array, sizes: Array, threshold: float) -> Index:
        """Args: pairs: uint32 of all sets, one after another; sizes: how many each has, shape (sets,)."""
        known, inverse, counts = np.unique(pairs, return_inverse=True, return_counts=True)
        ranks = np.empty(len(known), dtype=np.int64)
        ranks[np.argsort(counts, kind="stable")] = np.arange(len(known))
        row = np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)
        keys = np.sort(row << 32 | ranks[inverse])
        tokens = keys & 0xFFFFFFFF
        need = needed(sizes, threshold)
        first = _within(sizes) < np.repeat(sizes - need + SHARED, sizes)
        order = np.argsort(tokens[first], kind="stable")
        starts = np.searchsorted(tokens[first][order], np.arange(len(known) + 1))
        bits = int(np.clip(np.ceil(np.log2(4 * max(1, len(known)))), 10, 24))
        filled = np.bincount((known >> np.uint32(32 - bits)).astype(np.int64), minlength=1 << bits)
        slots = np.concatenate([[0], np.cumsum(filled)]).astype(np.int32)
        rows = row[first][order].astype(np.int32)
        return cls(threshold, known, ranks, sizes, tokens.astype(np.int32), starts, rows, slots)

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        for name in ARRAYS:
            np.save(folder / f"{name}.npy", getattr(self, name))
        np.save(folder / "threshold.npy", np.array(self.threshold))

    @classmethod
    def read(cls, folder: Path) -> Index:
        """Maps what `write` wrote, so that several processes share it."""
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
        return cls(float(np.load(folder / "threshold.npy")), **arrays)

    def alike(self, pairs: Array, sizes: Array, known: Array | None = None) -> Array:
        """Numbers of the indexed sets that are at least `threshold` alike to one of the given ones.

        Args:
            pairs, sizes: as `word_pairs` gives them.
            known: bool, shape (indexed sets,); those need not be looked for.
        """
        found = np.zeros(len(self.sizes), dtype=bool) if known is None else known.copy()
        before = found.copy()
        place = self._places(pairs)
        hit = _sums(place >= 0, sizes)
        need = needed(sizes, self.threshold)
        maybe = (sizes > 0) & (hit >= need)
        place, hit, sizes, need = place[np.repeat(maybe, sizes)], hit[maybe], sizes[maybe], need[maybe]
        row = np.repeat(np.arange(len(sizes), dtype=np.int64), hit)
        keys = np.sort(row << 32 | self.ranks[place[place >= 0]])  # rising within a row
        tokens, row = keys & 0xFFFFFFFF, keys >> 32
        for mine, theirs in self._candidates(tokens, row, sizes, need, found):
            self._compare(tokens, row, sizes, mine, theirs, found)
        return np.flatnonzero(found & ~before)

    def _places(self, pairs: Array) -> Array:
        """Where each pair stands in the index's, int32; -1 if it does not."""
        found = np.full(len(pairs), -1, dtype=np.int32)
        slot = (pairs >> np.uint32(32 - (len(self.slots) - 1).bit_length() + 1)).astype(np.int64)
        place, end = self.slots[slot], self.slots[slot + 1]
        left = np.flatnonzero(place < end)
        while len(left):
            same = self.pairs[place[left]] == pairs[left]
            found[left[same]] = place[left[same]]
            left = left[~same]
            place[left] += 1
            left = left[place[left] < end[left]]
        return found

    def _candidates(
        self, tokens: Array, row: Array, sizes: Array, need: Array, found: Array
    ) -> Iterator[tuple[Array, Array]]:
        """(given row, indexed set) where enough of the first pairs agree, a bounded number at a time."""
        shared = np.bincount(row, minlength=len(sizes))
        # What the index does not have is rarer than all it has, so it comes first.
        first = _within(shared[shared > 0]) < (shared - need + SHARED)[row]
        tokens, row = tokens[first], row[first]
        posted = self.starts[tokens + 1] - self.starts[tokens]
        total = np.cumsum(posted)
        start = 0
        while start < len(tokens):
            base = total[start - 1] if start else 0
            end = int(np.searchsorted(total, base + PAIRS_AT_ONCE, "right"))
            end = min(max(end, start + 1), len(tokens))
            end = int(np.searchsorted(row, row[end - 1], "right"))  # a row's pairs are counted together
            count = posted[start:end]
            place = np.repeat(self.starts[tokens[start:end]], count) + _within(count)
            mine, theirs = np.repeat(row[start:end], count), self.rows[place].astype(np.int64)
            fits = ~found[theirs]
            fits &= self.sizes[theirs] >= need[mine]
            fits &= sizes[mine] >= needed(self.sizes[theirs], self.threshold)
            keys, times = np.unique(mine[fits] << 32 | theirs[fits], return_counts=True)
            keys = keys[times >= np.minimum(SHARED, need[keys >> 32])]
            yield keys >> 32, keys & 0xFFFFFFFF
            start = end

    def _compare(
        self, tokens: Array, row: Array, sizes: Array, mine: Array, theirs: Array, found: Array
    ) -> None:
        """Marks in `found` which of `theirs` are really that much like `mine`."""
        have = row << 32 | tokens
        begin = np.concatenate([[0], np.cumsum(self.sizes)])
        total = np.cumsum(self.sizes[theirs])
        start = 0
        while start < len(mine):
            base = total[start - 1] if start else 0
            end = max(int(np.searchsorted(total, base + PAIRS_AT_ONCE, "right")), start + 1)
            one, other = mine[start:end], theirs[start:end]
            size = self.sizes[other]
            wanted = np.repeat(one << 32, size) | self.tokens[np.repeat(begin[other], size) + _within(size)]
            place = np.minimum(np.searchsorted(have, wanted), len(have) - 1)
            both = _sums(have[place] == wanted, size)
            similar = both / np.maximum(1, sizes[one] + size - both) >= self.threshold
            found[other[similar]] = True
            start = end


def needed(sizes: Array, threshold: float) -> Array:
    """Pairs that a set of that size shares with any that is at least `threshold` alike."""
    return np.maximum(1, np.ceil(threshold * sizes - 1e-9)).astype(np.int64)


def _within(sizes: Array) -> Array:
    """0, 1, … within each set, for all sets."""
    begin = np.cumsum(sizes) - sizes
    places: Array = np.arange(int(sizes.sum()), dtype=np.int64) - np.repeat(begin, sizes)
    return places


def _sums(values: Array, sizes: Array) -> Array:
    """Sums over sets that lie one after another, shape (sets,)."""
    total = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    ends = np.cumsum(sizes)
    sums: Array = total[ends] - total[ends - sizes]
    return sums
