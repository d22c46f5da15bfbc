"""Where a tokenizer's words end, for the two kinds that most models have: byte-level BPE and sentencepiece's BPE."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import regex

# The pattern of tokenizers' ByteLevel, which is GPT-2's.
BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# What a class of characters is within ASCII.
ASCII_CLASS = {"L": "a-zA-Z", "Lu": "A-Z", "Ll": "a-z", "N": "0-9", "Nd": "0-9"}
NO_ASCII = ("M", "Lt", "Lm", "Lo")
# Where a character is put to see how it is cut.
COMPANY = "a{0}b {0} 1{0}2 {0}{0}.{0}'s{0}\n{0}\r\n {0}A{0}1{0}  {0}\t{0}"
SPACE = "\u2581"  # what sentencepiece writes for a blank
SPACED = re.compile(f"{SPACE}*[^{SPACE}\n]+|{SPACE}*\n+|{SPACE}+")
# Words that hold a blank at their beginning alone and a line's end at their end alone, or blanks and line ends alone.
PHRASED = frozenset(
    [
        *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "(?i:'s|'t|'re|'ve|'m|'ll|'d)"),
        *(r" ?\p{L}+", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"),
        *(r" ?\p{N}+", r"\p{N}+", r"\p{N}{1,3}", r"\p{N}"),
        *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),
        *(r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
    ]
)
DIGITS_APART = (r"\p{N}|\P{N}+", r"\p{N}+|\P{N}+")
Step = dict[str, Any]


class Cutter(Protocol):
    """Cuts the stretches between added tokens into words that are encoded by themselves.

    `phrased`: a word begins at each blank and one ends behind each line's end, if no other blank stands beside it.
    """

    phrased: bool

    def plain(self, text: str) -> bool:
        """Whether `text`, which is not ASCII alone, is cut as the library would."""

    def cut(self, text: str, first: bool, ascii_alone: bool) -> tuple[list[str], bool]:
        """(words, whether the first begins with a character that is not the text's); `first`: nothing stands before."""

    def ids(self, word: str) -> tuple[int, ...]: ...

    def offsets(self, word: str) -> list[tuple[int, int]]:
        """(begin, end) in characters of each of the word's tokens."""


def cutter_of(backend: Any, added: Set[str]) -> Cutter | None:
    """The cutter for a `tokenizers.Tokenizer` with the `added` tokens, or None for another kind of tokenizer."""
    model = backend.model
    if type(model).__name__ != "BPE" or model.dropout:
        return None
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    normalizers = _steps(backend.normalizer, "normalizers")
    cutters = _steps(backend.pre_tokenizer, "pretokenizers")
    return _byte_level(backend, normalizers, cutters) or _spaced(backend, normalizers, cutters, added)


def _steps(part: Any, key: str) -> list[Step]:
    if part is None:
        return []
    found: Step = json.loads(part.__getstate__())
    steps: list[Step] = found[key] if found["type"] == "Sequence" else [found]
    return steps


# --- byte-level ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cut:
    """One step of a pre-tokenizer, for any text and for ASCII alone (Python's own expressions are faster)."""

    any: regex.Pattern[str]
    ascii: re.Pattern[str] | regex.Pattern[str]


class ByteLevelCutter:
    """Cuts by the pre-tokenizer's own regular expressions (GPT-2, Llama 3, Qwen, SmolLM …)."""

    def __init__(self, backend: Any, cuts: list[_Cut], composed: bool, phrased: bool) -> None:
        """
        Args:
            composed: whether texts are brought to NFC first.
            phrased: as of every Cutter.
        """
        self.phrased = phrased
        self._backend, self._cuts, self._composed = backend, cuts, composed
        self._alike: set[str] = set(map(chr, range(128)))
        self._odd: set[str] = set()

    def plain(self, text: str) -> bool:
        if self._composed and not unicodedata.is_normalized("NFC", text):
            return False
        for char in set(text) - self._alike:
            if char in self._odd or not self._same(char):
                self._odd.add(char)
                return False
            self._alike.add(char)
        return True

    def cut(self, text: str, first: bool, ascii_alone: bool) -> tuple[list[str], bool]:
        parts = [text]
        for cut in self._cuts:
            found = cut.ascii.findall if ascii_alone else cut.any.findall
            parts = found(parts[0]) if len(parts) == 1 else [piece for part in parts for piece in found(part)]
        return parts, False

    def ids(self, word: str) -> tuple[int, ...]:
        return tuple(self._backend.encode(word, add_special_tokens=False).ids)

    def offsets(self, word: str) -> list[tuple[int, int]]:
        offsets: list[tuple[int, int]] = self._backend.encode(word, add_special_tokens=False).offsets
        return offsets

    def _same(self, char: str) -> bool:
        """Whether the character is cut as the library cuts it: the two may know different versions of Unicode."""
        text = COMPANY.format(char)
        theirs = [end for _, (_, end) in self._backend.pre_tokenizer.pre_tokenize_str(text)]
        return theirs == list(accumulate(map(len, self.cut(text, True, False)[0])))


def _byte_level(backend: Any, normalizers: list[Step], steps: list[Step]) -> ByteLevelCutter | None:
    if [step["type"] for step in normalizers] not in ([], ["NFC"]):
        return None
    if not steps or steps[-1]["type"] != "ByteLevel":
        return None
    cuts, patterns = [], []
    for step in steps:
        pattern = _pattern(step)
        cut = _compiled(pattern) if pattern else None
        if pattern is None or (pattern and cut is None):
            return None
        if cut is not None and pattern is not None:
            cuts.append(cut)
            patterns.append(pattern)
    return ByteLevelCutter(backend, cuts, bool(normalizers), _phrased(patterns))


def _phrased(patterns: list[str]) -> bool:
    """Whether a step keeps phrases apart, and the steps before it only digits."""
    apart = [pattern for pattern in patterns if pattern not in DIGITS_APART]
    return bool(apart) and all(PHRASED.issuperset(_alternatives(pattern)) for pattern in apart)


def _alternatives(pattern: str) -> list[str]:
    """What stands between the bars that are in no brackets."""
    found, depth = [""], 0
    for token in re.findall(r"\\.|.", pattern, re.DOTALL):
        depth += (token in "([") - (token in ")]")
        if token == "|" and not depth:
            found.append("")
        else:
            found[-1] += token
    return found


def _pattern(step: Step) -> str | None:
    """What a step finds its words by; "" if it cuts nothing, None if it is of another kind."""
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use}:
            return BYTE_LEVEL if use else ""
        case {"type": "Digits", "individual_digits": single}:
            return r"\p{N}|\P{N}+" if single else r"\p{N}+|\P{N}+"
        case {"type": "Split", "pattern": {"Regex": found}, "behavior": "Isolated", "invert": False}:
            return str(found)
        case {"type": "Split", "pattern": {"Regex": found}, "behavior": "Removed", "invert": True}:
            return str(found)
    return None


def _compiled(pattern: str) -> _Cut | None:
    """None where the library's expressions and these mean different things: sets within sets, groups."""
    if re.search(r"\[[^\]]*(\[|&&)", pattern) or re.search(r"(?<!\\)\((?!\?)", pattern):
        return None
    try:
        found = regex.compile(pattern)
        within = _within_ascii(pattern)
        return _Cut(found, re.compile(within, re.ASCII) if within else found)
    except (regex.error, re.error):
        return None


def _within_ascii(pattern: str) -> str | None:
    """The pattern for ASCII texts in Python's own syntax, None where a class has no such form."""
    out, inside, place = [], False, 0
    while place < len(pattern):
        named = re.match(r"\\([pP])\{(\w+)\}", pattern[place:])
        if named:
            negated, name = named[1] == "P", named[2]
            if name not in (*ASCII_CLASS, *NO_ASCII) or (inside and negated):
                return None
            chars = ASCII_CLASS.get(name, "")
            if not inside and not chars:
                return None
            out.append(chars if inside else f"[{'^' if negated else ''}{chars}]")
            place += named.end()
            continue
        size = 2 if pattern[place] == "\\" else 1
        char = pattern[place : place + size]
        inside = (inside or char == "[") and char != "]"
        out.append(char)
        place += size
    return "".join(out)


# --- sentencepiece ------------------------------------------------------------------------------


class SpacedCutter:
    """Cuts before blanks and around line ends, over which no token of the vocabulary reaches (Llama 2, Mistral …)."""

    phrased = False  # its words are as long

    def __init__(self, backend: Any, prefix: str) -> None:
        """
        Args:
            prefix: before which stretches a blank is put: "each", "first" (and not before a blank), "no".
        """
        self._model, self._prefix = backend.model, prefix

    def plain(self, text: str) -> bool:
        return SPACE not in text

    def cut(self, text: str, first: bool, ascii_alone: bool) -> tuple[list[str], bool]:
        spaced = text.replace(" ", SPACE)
        headed = self._prefix == "each" or (self._prefix == "first" and first and spaced[0] != SPACE)
        return SPACED.findall(SPACE + spaced if headed else spaced), headed

    def ids(self, word: str) -> tuple[int, ...]:
        return tuple(token.id for token in self._model.tokenize(word))

    def offsets(self, word: str) -> list[tuple[int, int]]:
        place = [number for number, char in enumerate(word) for _ in char.encode()]
        return [
            (place[begin], place[end - 1] + 1)
            for begin, end in (t.offsets for t in self._model.tokenize(word))
        ]


def _spaced(backend: Any, normalizers: list[Step], steps: list[Step], added: Set[str]) -> SpacedCutter | None:
    prefix = _prefix(normalizers, steps)
    if prefix is None or backend.model.ignore_merges:
        return None
    vocabulary = backend.get_vocab(with_added_tokens=False)
    if SPACE not in vocabulary:
        return None
    over = re.compile(f"[^{SPACE}]{SPACE}|[^{SPACE}\n]\n|\n[^\n]")
    if any(over.search(token) for token in vocabulary if token not in added):
        return None
    return SpacedCutter(backend, prefix)


def _prefix(normalizers: list[Step], steps: list[Step]) -> str | None:
    """Before which stretches a blank is put; None for another kind of tokenizer."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepend = {"type": "Prepend", "prepend": SPACE}
    match normalizers, steps:
        case [one, other], [] if one == prepend and other == replace:
            return "each"
        case [one], [] if one == replace:
            return "no"
        case [], [{"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False}]:
            return {"first": "first", "never": "no"}.get(scheme)
    return None
