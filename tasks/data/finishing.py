"""A rendered row's tokens -> its ids and labels: begin and end tokens, what is learnt, pictures, and the cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tasks.data.image_turns import Expansion
from tasks.data.prepared import IGNORED
from tasks.data.rendering import Span
from tasks.data.rows import BadRow, Picture
from tasks.data.tokens import Tokeniser, Tokens
from tasks.data.vision import Vision

Ids = NDArray[np.int32]
NONE: Ids = np.zeros(0, np.int32)


@dataclass(eq=False, slots=True)
class Encoded:
    """`input_ids` and `labels`, each of shape (tokens,), int32 (or lists); a label of -100 is not learnt.

    shown: how many of the row's pictures are among the ids; image_tokens: theirs.
    """

    input_ids: Ids | list[int]
    labels: Ids | list[int]
    truncated: bool
    shown: int = 0
    image_tokens: int = 0


class Draft(NamedTuple):
    """A row before it is cut into tokens: `spans` of `text` are learnt, and `after` with them.

    `border`: the character before which no token may reach behind it.
    """

    text: str
    spans: tuple[Span, ...]
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    everything: bool = False
    border: int = 0
    pictures: tuple[Picture, ...] = ()


class Finisher:
    """Makes ids and labels of drafts, at most `max_length` tokens of each."""

    def __init__(self, tokeniser: Tokeniser, max_length: int, vision: Vision | None) -> None:
        self._tokeniser, self._max_length, self._vision = tokeniser, max_length, vision

    def of(self, draft: Draft, tokens: Tokens) -> Encoded | BadRow:
        """Ids and labels, or why nothing of it can be learnt."""
        if draft.border:
            tokens = self._tokeniser.parted(draft.text, draft.border, tokens)
        before, after = self._around(draft, tokens)
        ids = np.concatenate([before, tokens.ids, after]) if len(before) or len(after) else tokens.ids
        if draft.everything:
            labels = ids.copy()
        else:
            labels = np.empty_like(ids)
            labels.fill(IGNORED)
            for begin, end in draft.spans:
                first, behind = tokens.ending_by(begin), tokens.starting_before(end)
                labels[len(before) + first : len(before) + behind] = tokens.ids[first:behind]
            labels[len(ids) - len(after) :] = after
        if self._vision is None and not draft.pictures:
            cut = self._cut(len(ids), min(len(ids), self._max_length), len(before), tokens)
            return self._text(ids, labels, cut)
        try:
            spread = Expansion.of(ids, draft.pictures, self._vision)
        except BadRow as error:
            return error
        labels[spread.places] = IGNORED
        cut = self._cut(len(ids), spread.kept(self._max_length), len(before), tokens)
        if not len(spread.places):
            return self._text(ids, labels, cut)
        return self._with_pictures(ids, labels, cut, spread)

    def _text(self, ids: Ids, labels: Ids, cut: int) -> Encoded | BadRow:
        if not (labels[1:cut] != IGNORED).any():
            return self._too_short(f"this row has {len(ids)} tokens")
        if cut < len(ids):
            cut = int(np.flatnonzero(labels[:cut] != IGNORED)[-1]) + 1
        return Encoded(ids[:cut], labels[:cut], cut < len(ids))

    def _with_pictures(self, ids: Ids, labels: Ids, cut: int, spread: Expansion) -> Encoded | BadRow:
        learnt = np.flatnonzero(labels != IGNORED)
        learnt = learnt[learnt > 0]  # nothing predicts the first
        if not (learnt < cut).any():
            total = int(spread.ends[-1])
            needed = int(spread.ends[learnt[0]]) if len(learnt) else total
            return self._too_short(
                f"this row has {total} tokens, {spread.image_tokens(len(ids))} of them its images', and the first that "
                f"is learnt is number {needed}"
            )
        if cut < len(ids):
            cut = int(learnt[learnt < cut][-1]) + 1
        times = spread.times[:cut]
        return Encoded(
            np.repeat(ids[:cut], times),
            np.repeat(labels[:cut], times),
            cut < len(ids),
            spread.shown(cut),
            spread.image_tokens(cut),
        )

    def _too_short(self, said: str) -> BadRow:
        return BadRow(
            f"no answer token within max_length={self._max_length}",
            f"raise prepare_data.max_length ({said}) or shorten its question",
        )

    def _around(self, draft: Draft, tokens: Tokens) -> tuple[Ids, Ids]:
        """Begin and end tokens, unless the text brings them itself."""
        if not draft.before and not draft.after:
            return NONE, NONE
        before = np.array(draft.before, np.int32)
        if len(before) and np.array_equal(tokens.ids[: len(before)], before):
            before = before[:0]
        after = np.array(draft.after, np.int32)
        if len(after) and len(tokens.ids) and tokens.ids[-1] == after[0]:
            after = after[:0]
        return before, after

    def _cut(self, tokens: int, kept: int, before: int, found: Tokens) -> int:
        """How many of `tokens` are kept of the `kept` that have room, half a character never."""
        if kept == tokens or kept - before >= len(found.ids):
            return kept
        return before + found.whole(max(kept - before, 0))
