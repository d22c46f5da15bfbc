"""Ids word by word are the library's own, for any text."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tasks.data.cutting import cutter_of
from tasks.data.tokens import LibraryTokens
from tasks.data.words import Words
from tests.unit import legacy_cases

SPECIALS = ["<|im_start|>", "<|im_end|>"]
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
SPACED = ("metaspace", "prepended")
KINDS = ("gpt2", "qwen", "llama3", "smollm", *SPACED)
SAID = [
    *legacy_cases.TEXT,
    "It's the user's 2024 réponse:\n\n  def f(x): return x  # 你好 🦜",
    " \t\r\n'LL 1234567 e\u0301",
]


def by_words(pattern: str) -> pre_tokenizers.PreTokenizer:
    parts = [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    ]
    return pre_tokenizers.Sequence(parts)


def byte_level(kind: str) -> PreTrainedTokenizerFast:
    cuts = {
        "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "blank": pre_tokenizers.ByteLevel(add_prefix_space=True),
        "qwen": by_words(QWEN),
        "llama3": by_words(QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)),
        "bloom": by_words(BLOOM),
        "smollm": pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
    }
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = cuts[kind]
    if kind == "qwen":
        backend.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(SAID * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")


def spaced(kind: str) -> PreTrainedTokenizerFast:
    """As sentencepiece's: a blank is a letter, and unknown letters are bytes."""
    first = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    first.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    first.train_from_iterator(
        [text.replace("\n", " ") for text in SAID * 9],
        trainers.BpeTrainer(
            vocab_size=900,
            special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
            show_progress=False,
        ),
    )
    backend = Tokenizer(first.model)
    backend.add_special_tokens(SPECIALS)
    if kind == "metaspace":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, tuple[PreTrainedTokenizerFast, Words]]:
    found = {}
    for kind in KINDS:
        tokenizer = spaced(kind) if kind in SPACED else byte_level(kind)
        words = Words.of(tokenizer)
        assert words is not None, kind
        found[kind] = (tokenizer, words)
    return found


PIECES = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        [*SPECIALS, *SAID, "\n", " ", "  ", "'s", "\u2581", "\u00a0", "🏽", "é", "e\u0301", "<|im_"]
    ),
    st.text("ab1 \n'.\tÜ你", max_size=12),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(PIECES, max_size=8).map("".join), st.data())
def test_ids_and_borders_are_the_librarys(
    tokenizers: dict[str, tuple[PreTrainedTokenizerFast, Words]], text: str, data: st.DataObject
) -> None:
    for kind, (tokenizer, words) in tokenizers.items():
        _, mine = words.encode(["before it", text])
        if mine is None:
            assert not text.isascii(), kind
            continue
        theirs = LibraryTokens(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False), len(text))
        assert mine.ids.tolist() == theirs.ids.tolist(), kind
        char = data.draw(st.integers(0, len(text)))
        assert mine.ending_by(char) == theirs.ending_by(char), kind
        assert mine.starting_before(char) == theirs.starting_before(char), kind
        token = data.draw(st.integers(0, len(mine.ids)))
        assert mine.whole(token) == theirs.whole(token), kind


def test_phrases_are_known_where_words_keep_within_them() -> None:
    phrased = {
        kind: cutter_of(byte_level(kind).backend_tokenizer, set()) for kind in ("gpt2", "qwen", "smollm")
    }
    assert all(cutter is not None and cutter.phrased for cutter in phrased.values())
    over = byte_level("qwen")
    over.backend_tokenizer.pre_tokenizer = by_words(QWEN.replace(r"[\r\n]*", r"[\r\n/]*"))
    cutter = cutter_of(over.backend_tokenizer, set())
    assert cutter is not None and not cutter.phrased, "a word may go on behind a line's end"


def test_other_kinds_are_left_to_the_library() -> None:
    assert Words.of(byte_level("bloom")) is None, "its expression has sets within sets"
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a"))
    assert Words.of(PreTrainedTokenizerFast(tokenizer_object=words)) is None
    assert Words.of(byte_level("blank")) is None
