"""Which rows are held out, and which share of a source is used: by hashes of what rows say, never by their place."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def draws(groups: Iterable[str]) -> Array:
    """A number below 2^64 for each group, shape (groups,)."""
    digests = b"".join(hashlib.sha256(f"split {group}".encode()).digest()[:8] for group in groups)
    return np.frombuffer(digests, dtype=">u8").astype(np.uint64)


def held_out(drawn: Array, fraction: float) -> Array:
    """By the hash of the row's group alone: adding rows never moves an old one to the other side."""
    return below(drawn, fraction)


def copies(low: Array, weight: float) -> Array:
    """How often a source of this weight gives each row, by the second half of its id: the mean is `weight`."""
    whole = math.floor(weight)
    return whole + below(low, weight - whole).astype(np.int64)


def below(drawn: Array, share: float) -> Array:
    """Whether each number below 2^64 is in the first `share` of them, bool."""
    limit = math.ceil(share * 2**64)
    return drawn < np.uint64(limit) if limit < 2**64 else np.ones(len(drawn), dtype=bool)
