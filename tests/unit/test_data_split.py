"""The split: no near-duplicate across it, whatever the threshold or the script; the built-in rows."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from tasks.data.docstrings import LONGEST_WORDS, docstring_rows
from tasks.data.rows import Row
from tasks.data.split import OVERLOOKED, held_out, near_duplicates, shingles
from tests.tiny import REPOSITORY


@pytest.fixture(scope="module")
def built_in() -> list[Row]:
    return list(docstring_rows())


def simple(question: str, answer: str, group: str) -> Row:
    return Row((("user", question), ("assistant", answer)), group, "w")


def alike(one: Row, other: Row) -> float:
    mine, theirs = shingles(one), shingles(other)
    return len(mine & theirs) / len(mine | theirs)


def test_near_duplicates_are_found_and_others_left() -> None:
    text = "the quick brown fox jumps over the lazy dog and then it sleeps all day long in the warm sun"
    train = [simple("Tell me of the fox", text, "1")]
    like = simple("Tell me of the fox!", text + " again", "2")
    other = simple("What is two and two", "It is four, as everybody knows from school", "3")
    assert near_duplicates(train, [like, other], 0.8) == {like.id}


@pytest.mark.parametrize("threshold", [0.3, 0.6, 0.8, 1.0])
def test_what_is_found_is_what_comparing_every_pair_finds(threshold: float) -> None:
    assert OVERLOOKED <= 1e-4
    draw = random.Random(7)
    words = [f"w{n}" for n in range(300)]
    train, held = [], []
    for number in range(120):
        said = draw.choices(words, k=30)
        train.append(simple("q", " ".join(said), f"t{number}"))
        for _ in range(draw.randint(0, 8)):
            said[draw.randrange(30)] = draw.choice(words)
        held.append(simple("q", " ".join(said), f"v{number}"))
    exact = {row.id for row in held if any(alike(row, other) >= threshold for other in train)}
    assert 0 < len(exact) < len(held) or threshold == 0.3
    assert near_duplicates(train, held, threshold) == exact


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
    groups: dict[str, set[bool]] = {}
    for row in built_in:
        groups.setdefault(row.group, set()).add(held_out(row, 0.1))
    assert len(groups) < len(built_in)
    assert all(len(sides) == 1 for sides in groups.values())
    assert 0.07 < sum(held_out(row, 0.1) for row in built_in) / len(built_in) < 0.13
