"""Texts on which a converted tokenizer must give the ids of the published one, or it is refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from tasks.errors import UserError

TEXTS = (
    "",
    " ",
    "Hello, world! It's 12345.67 km; they'll've gone.",
    " leading, trailing and   inner   spaces  ",
    "\n",
    "\n\n  \tdef f(x):\n\treturn x ** 2  # comment\r\n\r\n",
    "你好，世界！今天是2023年6月25日，气温３２℃。",
    "Ça coûte 5 €; naïve cafe\u0301, Straße, Ελλάδα, Привет, こんにちは, 안녕하세요, مرحبا",
    "emoji 👩‍👩‍👧 🏳️‍🌈, math ∑∀x∈ℝ, rare 𠮷 \u200b\ufeff end",
    "ﬁne ＡＢＣ ①②③ ｶﾅ",
    'aaaaaaaaaaaaaaaa 0000000 ----====---- <p>&nbsp;</p> {"a": [1, 2]}',
    "▁under▁ _score_ ▁",
)
DRAWN = 400


def check_same_ids(
    new: Callable[[str], list[int]], old: Callable[[str], list[int]], words: Sequence[str], name: str
) -> None:
    """Compares both on fixed texts and on the vocabulary's own `words`, drawn and strung together.

    Raises:
        UserError: a text gets other ids.
    """
    draw = random.Random(0)
    drawn = ["".join(draw.choice(words) for _ in range(6)) for _ in range(DRAWN)] if words else []
    for text in (*TEXTS, *drawn):
        ours, theirs = new(text), old(text)
        if ours != theirs:
            raise UserError(
                f"the tokenizer of {name} cannot be converted exactly: {text[:60]!r} becomes {ours[:12]} where the "
                f"published one gives {theirs[:12]}; put a tokenizer.json that was checked beside config.json, with "
                "a chat template"
            )
