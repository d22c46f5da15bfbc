"""Which rows are held out, and that none of them is also trained on."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from datasketch import MinHash, MinHashLSH

from tasks.data.rows import Row

PERMUTATIONS = 64
# A pair exactly at the threshold is overlooked with at most this probability.
OVERLOOKED = 1e-4
SHINGLE_WORDS = 2
# A letter of a script that is written without spaces counts as a word.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")


def held_out(row: Row, fraction: float) -> bool:
    """By the hash of the row's group alone: adding rows never moves an old one to the other side."""
    draw = int.from_bytes(hashlib.sha256(f"split {row.group}".encode()).digest()[:8], "big")
    return draw < fraction * 2**64


def shingles(row: Row) -> set[str]:
    """Pairs of neighbouring words over all turns but the system's, case and punctuation aside."""
    words = WORD.findall(" ".join(content for role, content in row.messages if role != "system").lower())
    if len(words) < SHINGLE_WORDS:
        return set(words)
    return {" ".join(words[start : start + SHINGLE_WORDS]) for start in range(len(words) - SHINGLE_WORDS + 1)}


def near_duplicates(train: Sequence[Row], validation: Sequence[Row], threshold: float) -> set[str]:
    """Ids of validation rows whose word pairs are at least `threshold` alike (Jaccard) to a training row's.

    Candidates come from MinHash buckets, the decision from the exact sets.
    """
    held = {row.id: shingles(row) for row in validation}
    if not held:
        return set()
    index = MinHashLSH(num_perm=PERMUTATIONS, params=_bands(threshold))
    for name, found in held.items():
        index.insert(name, _sketch(found), check_duplication=False)
    alike: set[str] = set()
    for row in train:
        mine = shingles(row)
        for name in index.query(_sketch(mine)):
            if name not in alike and _jaccard(mine, held[name]) >= threshold:
                alike.add(name)
    return alike


def _bands(threshold: float) -> tuple[int, int]:
    """(bands, hashes a band): the most selective banding that overlooks no more than OVERLOOKED.

    A pair of similarity s shares a band with probability 1 - (1 - s^hashes)^bands.
    """
    for hashes in range(PERMUTATIONS // 2, 1, -1):
        bands = PERMUTATIONS // hashes
        if (1 - threshold**hashes) ** bands <= OVERLOOKED:
            return bands, hashes
    return PERMUTATIONS, 1


def _jaccard(one: set[str], other: set[str]) -> float:
    return len(one & other) / max(1, len(one | other))


def _sketch(found: set[str]) -> MinHash:
    sketch = MinHash(num_perm=PERMUTATIONS, seed=1)
    sketch.update_batch([shingle.encode() for shingle in found])
    return sketch
