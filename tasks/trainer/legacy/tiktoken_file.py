"""A .tiktoken file (base64 of a token's bytes, its rank) as a fast byte-level tokenizer, checked against its rule."""

from __future__ import annotations

import base64
import binascii
import unicodedata
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tasks.errors import UserError
from tasks.trainer.legacy.probes import check_same_ids

Ranks = dict[bytes, int]


def read_ranks(file: Path) -> Ranks:
    """Raises UserError: a line is not base64 and a rank, ranks have gaps, or a byte has none."""
    try:
        lines = [line.split() for line in file.read_bytes().splitlines() if line.strip()]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (ValueError, binascii.Error) as error:
        raise UserError(f"{file} is no tiktoken file ({error}); take the published one") from None
    if sorted(ranks.values()) != list(range(len(lines))) or not all(
        bytes([byte]) in ranks for byte in range(256)
    ):
        raise UserError(
            f"{file} has gaps in its ranks or lacks a byte, so the ids of special tokens are unknown; take the "
            "published file"
        )
    return ranks


def from_tiktoken(file: Path, words: str, specials: Sequence[str], nfc: bool) -> PreTrainedTokenizerFast:
    """The same ids for the same text; `specials` are numbered behind the ranks.

    Args:
        words: the pattern that cuts a text into the stretches within which bytes are joined.
        nfc: the text is brought to Unicode's composed form first.

    Raises:
        UserError: no such file, or a text gets other ids.
    """
    ranks = read_ranks(file)
    tokenizer = Tokenizer(_model(ranks))
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    cut = pre_tokenizers.Split(Regex(words), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in specials])
    assert [tokenizer.token_to_id(token) for token in specials] == [
        len(ranks) + place for place in range(len(specials))
    ]

    def published(text: str) -> list[int]:
        text = unicodedata.normalize("NFC", text) if nfc else text
        stretches = cut.pre_tokenize_str(text) if text else []
        return [rank for stretch, _ in stretches for rank in joined(stretch.encode(), ranks)]

    readable = [text for text in (token.decode("utf-8", "ignore") for token in ranks) if text]
    check_same_ids(
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        published,
        [text for text in readable if not any(token in text for token in specials)],
        file.name,
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def _model(ranks: Ranks) -> models.BPE:
    letters = bytes_to_unicode()

    def spelt(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    # tiktoken joins whichever neighbours make the token of lowest rank: every way to make one is a merge.
    merges = [
        (rank, spelt(token[:cut]), spelt(token[cut:]))
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    return models.BPE(
        vocab={spelt(token): rank for token, rank in ranks.items()},
        merges=[(left, right) for _, left, right in sorted(merges, key=lambda merge: merge[0])],
        ignore_merges=True,  # tiktoken looks up a whole stretch before it joins anything
    )


def joined(stretch: bytes, ranks: Ranks) -> list[int]:
    """tiktoken's rule: join the neighbours that make the lowest-ranked token, leftmost first, until none do."""
    if stretch in ranks:
        return [ranks[stretch]]
    parts = [stretch[place : place + 1] for place in range(len(stretch))]
    while len(parts) > 1:
        made = [ranks.get(left + right) for left, right in pairwise(parts)]
        best = min((rank for rank in made if rank is not None), default=None)
        if best is None:
            break
        place = made.index(best)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return [ranks[part] for part in parts]
