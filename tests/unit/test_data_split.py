"""The split: no near-duplicate across it, whatever the threshold or the script; the built-in rows."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.data import alike as alike_module
from tasks.data.alike import WORD, Index, word_pairs
from tasks.data.docstrings import LONGEST_WORDS, docstring_rows
from tasks.data.rows import Row
from tasks.data.split import draws, held_out
from tests.tiny import REPOSITORY


def shingles(row: Row) -> set[str]:
    """Pairs of neighbouring words, by Python's own sets."""
    words = WORD.findall(" ".join(text for role, text in row.messages if role != "system").lower())
    return set(map(" ".join, itertools.pairwise(words))) or set(words)


def near_duplicates(train: list[Row], held: list[Row], threshold: float) -> set[str]:
    index = Index.of(*word_pairs(held), threshold)
    return {held[place].id for place in index.alike(*word_pairs(train))}


@pytest.fixture(scope="module")
def built_in() -> list[Row]:
    return list(docstring_rows())


def simple(question: str, answer: str, group: str) -> Row:
    return Row((("user", question), ("assistant", answer)), group, "w")


def alike(one: Row, other: Row) -> float:
    mine, theirs = shingles(one), shingles(other)
    return len(mine & theirs) / max(1, len(mine | theirs))


def test_near_duplicates_are_found_and_others_left() -> None:
    text = "the quick brown fox jumps over the lazy dog and then it sleeps all day long in the warm sun"
    train = [simple("Tell me of the fox", text, "1")]
    like = simple("Tell me of the fox!", text + " again", "2")
    other = simple("What is two and two", "It is four, as everybody knows from school", "3")
    assert near_duplicates(train, [like, other], 0.8) == {like.id}


@pytest.mark.parametrize("threshold", [0.1, 0.3, 0.6, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("vocabulary", [12, 300])
def test_what_is_found_is_what_comparing_every_pair_finds(
    threshold: float, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few words: the same pairs are in most rows. Rows of no word and of one are among them."""
    monkeypatch.setattr(alike_module, "PAIRS_AT_ONCE", 500)
    draw = random.Random(7)
    words = [f"w{n}" for n in range(vocabulary)]
    train, held = [simple("?", "!", "t")], [simple("?", "…", "v")]
    for number in range(120):
        said = draw.choices(words, k=draw.randint(1, 30))
        train.append(simple("?", " ".join(said), f"t{number}"))
        for _ in range(draw.randint(0, 8)):
            said[draw.randrange(len(said))] = draw.choice(words)
        held.append(simple("?", " ".join(said), f"v{number}"))
    exact = {row.id for row in held if any(alike(row, other) >= threshold for other in train)}
    assert 0 < len(exact) < len(held)
    assert near_duplicates(train, held, threshold) == exact


def test_an_index_read_back_finds_the_same(tmp_path: Path) -> None:
    rows = [simple("q", f"one two three four five six seven {word}", word) for word in "abc"]
    index = Index.of(*word_pairs(rows), 0.7)
    index.write(tmp_path / "index")
    like = word_pairs([simple("q", "one two three four five six seven", "d")])
    assert Index.read(tmp_path / "index").alike(*like).tolist() == index.alike(*like).tolist() == [0, 1, 2]


def test_words_of_ascii_rows_are_those_of_others() -> None:
    """A quicker way is taken for ASCII; both must hash the same words."""
    text = "".join(map(chr, range(1, 128))) + " It's foo_bar, x2 & CamelCase-dash"
    (plain, size), (other, others) = (
        word_pairs([simple("q", text, "")]),
        word_pairs([simple("q", text + " é", "")]),
    )
    assert set(plain.tolist()) < set(other.tolist())
    assert others[0] == size[0] + 1


def test_scripts_without_spaces_are_compared_letter_by_letter() -> None:
    train = [simple("请介绍一下北京的历史和文化", "北京是中国的首都，有三千多年的历史，文化非常丰富。", "1")]
    like = simple("请介绍一下北京的历史和文化吧", "北京是中国的首都，有三千多年的历史，文化非常丰富！", "2")
    other = simple("怎样做好吃的米饭", "先把米洗干净，再加适量的水煮二十分钟。", "3")
    assert near_duplicates(train, [like, other], 0.8) == {like.id}


def test_docstring_rows_are_many_clean_and_short(built_in: list[Row]) -> None:
    assert len(built_in) >= 2000
    for row in built_in:
        assert row.answer == " ".join(row.answer.split())
        assert 0 < len(row.answer.split()) <= LONGEST_WORDS + 20
        assert row.prompt[-1]["content"].endswith(("?", ".", '"'))
    about = {row.where.removeprefix("docstring of ").split(".")[0] for row in built_in}
    assert {"json", "pathlib", "statistics"} < about
    assert not about & {"tkinter", "turtle", "test", "idlelib"}, "not every build of Python has them"


def test_docstring_rows_are_the_same_in_another_process_and_import_nothing(built_in: list[Row]) -> None:
    code = (
        "import sys; from tasks.data.docstrings import docstring_rows; "
        "print(*(row.id for row in docstring_rows())); assert 'antigravity' not in sys.modules"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert said.stdout.split() == [row.id for row in built_in]


def test_rows_about_one_docstring_are_on_one_side(built_in: list[Row]) -> None:
    held = held_out(draws(row.group for row in built_in), 0.1)
    groups: dict[str, set[bool]] = {}
    for row, side in zip(built_in, held.tolist(), strict=True):
        groups.setdefault(row.group, set()).add(side)
    assert len(groups) < len(built_in)
    assert all(len(sides) == 1 for sides in groups.values())
    assert 0.07 < held.mean() < 0.13
