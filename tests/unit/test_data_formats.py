"""Rows of every format: what they become, what is refused and why, and that nothing is dropped without a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.data.formats import RawRow, canonical, detect
from tasks.data.rows import BadRow, Row, written
from tasks.errors import UserError
from tests.unit.reading import read, write_lines

USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TOOL = {"role": "tool", "content": "t"}
PLAIN = (("user", "q"), ("assistant", "a"))


def chat(*turns: Any, **more: Any) -> RawRow:
    return RawRow({"messages": list(turns), **more}, "f: row 1")


def row(content: Any, form: str = "auto", /, **columns: str) -> Row:
    return canonical(RawRow(content, "f: row 1"), form, columns)  # type: ignore[arg-type]


def bad(content: Any, form: str = "auto", /, **columns: str) -> BadRow:
    with pytest.raises(BadRow) as error:
        row(content, form, **columns)
    assert error.value.fix
    return error.value


# --- what rows become ---------------------------------------------------------------------------


def test_alpaca_with_system_history_and_input() -> None:
    found = row(
        {"instruction": "I", "input": "X", "output": "O", "system": "S", "history": [["q", "a"]]},
    )
    assert found.messages == (
        ("system", "S"),
        ("user", "q"),
        ("assistant", "a"),
        ("user", "I\nX"),
        ("assistant", "O"),
    )
    assert row({"instruction": "", "input": "X", "output": "O"}).messages[0] == ("user", "X")


@pytest.mark.parametrize("nothing", [None, "", float("nan")])
def test_columns_that_may_be_left_empty(nothing: Any) -> None:
    """NaN: what pandas writes for a cell that is not there."""
    found = row({"instruction": "q", "input": nothing, "output": "a", "system": nothing, "history": nothing})
    assert found.messages == PLAIN
    assert row({"messages": [USER, ASSISTANT], "tools": nothing, "images": nothing}).messages == PLAIN


@pytest.mark.parametrize(
    "content",
    [
        {"messages": [USER, ASSISTANT]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"messages": None, "conversations": [USER, ASSISTANT]},
        {"messages": json.dumps([USER, ASSISTANT])},  # a cell of a CSV
        {"messages": [json.dumps(USER), json.dumps(ASSISTANT)]},  # JSON in Arrow's text
        {"messages": {"role": ["user", "assistant"], "content": ["q", "a"]}},  # a Sequence of datasets
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, ASSISTANT]},
        {"messages": [USER | {"name": None, "tool_calls": None}, ASSISTANT | {"tool_calls": []}]},
    ],
)
def test_chats_of_every_style(content: Any) -> None:
    assert detect([RawRow(content, "")], "f")[0] == "chat"
    assert row(content).messages == row(content, "chat").messages == PLAIN


def test_a_system_text_may_stand_in_a_column_or_in_the_first_turn() -> None:
    said = (("system", "s"), *PLAIN)
    assert row({"messages": [USER, ASSISTANT], "system": "s"}).messages == said
    for role in ("system", "developer"):
        assert row({"messages": [{"role": role, "content": "s"}, USER, ASSISTANT]}).messages == said


def test_a_completion_has_no_template_and_keeps_its_blanks() -> None:
    found = row({"prompt": "q: ", "completion": " a\n"})
    assert (found.kind, found.messages) == ("completion", (("user", "q: "), ("assistant", " a\n")))
    assert row({"prompt": "[not a list", "completion": "a"}).kind == "completion"


def test_a_completion_of_messages_is_a_chat_of_which_only_the_completion_is_learnt() -> None:
    found = row({"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]})
    assert (found.kind, len(found.messages), found.unlearnt) == ("chat", 4, (1,))
    assert found.id != row({"messages": [USER, ASSISTANT, USER, ASSISTANT]}).id


def test_plain_text_is_one_turn_that_is_learnt_whole() -> None:
    found = row({"text": " once\n"})
    assert (found.kind, found.messages) == ("text", (("assistant", " once\n"),))


def test_turns_that_are_only_read_are_marked() -> None:
    """OpenAI's weight, ms-swift's loss."""
    for key, off, on in (("weight", 0, 1), ("loss", False, True)):
        found = row({"messages": [USER, ASSISTANT | {key: off}, USER, ASSISTANT | {key: on}]})
        assert found.unlearnt == (1,)
    assert "no answer that is learnt" in str(bad({"messages": [USER, ASSISTANT | {"weight": 0}]}))
    assert "neither 0 nor 1: 0.5" in str(bad({"messages": [USER, ASSISTANT | {"weight": 0.5}]}))


def test_columns_are_read_by_the_names_they_have_in_the_source() -> None:
    found = row({"Q": "q", "A": "a", "instruction": "other"}, instruction="Q", output="A")
    assert found.messages == PLAIN
    turns = [{"who": "Client", "said": "q"}, {"who": "Agent", "said": "a"}]
    names = {"messages": "talk", "role": "who", "content": "said", "user": "Client", "assistant": "Agent"}
    assert row({"talk": turns}, **names).messages == PLAIN
    assert row({"content": "x", "messages": [USER, ASSISTANT]}, text="content").kind == "text"


def test_what_is_hashed_and_kept_of_a_row_is_what_json_dumps_writes() -> None:
    said = ("system", 'q "\\/\b\f\n\r\t\x00\x1f\x7f'), ("user", "é 天 🦜\u2028\ufeff"), ("assistant", "a")
    assert written(said) == json.dumps(said, ensure_ascii=False)
    found = Row(said, "g", "w")
    assert found.prompt_json == json.dumps(found.prompt, ensure_ascii=False)
    call = {"function": {"name": "look", "arguments": {}}}
    asked = row({"messages": [USER, ASSISTANT | {"tool_calls": [call]}, TOOL, ASSISTANT]})
    assert json.loads(asked.prompt_json) == asked.prompt != []


def test_rows_that_belong_together_have_one_group() -> None:
    one, two = ({"instruction": q, "output": "a", "doc": 7} for q in "pq")
    assert row(one).group != row(two).group
    assert row(one, group="doc").group == row(two, group="doc").group == "7"
    assert row(one, group="doc").id == row(one).id
    picture = {"messages": [{"role": "user", "content": "<image>"}, ASSISTANT]}
    assert row(picture | {"image": "a.jpg"}).group != row(picture | {"image": "b.jpg"}).group


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "form", "reason"),
    [
        ({"instruction": "q", "output": ""}, "alpaca", "no answer"),
        ({"instruction": "q"}, "alpaca", "no answer"),
        ({"instruction": "q", "output": 3}, "alpaca", "int, not text: turn 2 3"),
        ({"instruction": None, "output": "a"}, "alpaca", "instruction is NoneType"),
        ({"instruction": "q", "input": 3, "output": "a"}, "alpaca", "input is int, not text: 3"),
        ({"question": "q", "output": "a"}, "alpaca", "no instruction: columns question, output"),
        ({"instruction": "q", "output": "a", "history": "x"}, "alpaca", "history is str, not a list"),
        ({"instruction": "q", "output": "a", "history": [["x"]]}, "alpaca", "no list of [question, answer]"),
        ("just text", "alpaca", "str instead of a row"),
        ({"messages": [USER]}, "chat", "no answer"),
        ({"messages": []}, "chat", "no question"),
        ({"messages": [ASSISTANT]}, "chat", "no question"),
        ({"messages": "q"}, "chat", "messages is str"),
        ({"messages": "[{'role': 'user'}]"}, "chat", "messages is text that is no JSON"),
        ({"text": " "}, "text", "an empty text"),
        ({"text": None}, "text", "an empty text"),
        ({"text": 3}, "text", "the text is int"),
        ({"prompt": "", "completion": "a"}, "completion", "an empty prompt"),
        ({"prompt": "q", "completion": " "}, "completion", "no answer"),
        ({"prompt": "q", "completion": None}, "completion", "no answer"),
        ({"prompt": None, "completion": "a"}, "completion", "no prompt"),
        ({"prompt": "q", "completion": [ASSISTANT]}, "completion", "prompt is str, not a list"),
        ({"text": "a", "tools": [{"name": "f"}]}, "text", "a text row has tools"),
        ({"x": 1}, "auto", "of no known format: columns x"),
        ({"text": "a", "videos": ["v"]}, "text", "it has videos, which is not learnt"),
    ],
)
def test_bad_rows_have_a_reason(content: Any, form: str, reason: str) -> None:
    assert reason in str(bad(content, form))


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (chat(USER, USER, ASSISTANT), "two user turns in a row: user, user, assistant"),
        (chat(USER, ASSISTANT, ASSISTANT), "two assistant turns in a row"),
        (chat(USER, TOOL, ASSISTANT), "a tool turn right after a user turn"),
        (chat(USER, ASSISTANT, TOOL, USER, ASSISTANT), "a user turn right after a tool turn"),
        (chat(USER, ASSISTANT, {"role": "system", "content": "s"}, USER, ASSISTANT), "not the first"),
        (chat(USER, ASSISTANT, USER), "no answer"),
        (chat({"role": ["user"], "content": "q"}, ASSISTANT), "unknown role: ['user'] in turn 1"),
        (chat({"role": "User", "content": "q"}, ASSISTANT), "unknown role: 'User' in turn 1"),
        (chat(USER, {"content": "a"}), "unknown role: None in turn 2"),
        (chat({"role": "user", "content": [{"type": "audio"}]}, ASSISTANT), "neither text nor an image"),
        (chat({"role": "user", "content": {"a": 1}}, ASSISTANT), "the user turn is dict, not text"),
        (chat({"role": "user", "content": "\ud83d"}, ASSISTANT), "lone surrogate"),
        (chat({"role": "user", "content": "caf\udce9"}, ASSISTANT), "bytes that are not UTF-8"),
        (chat("q", ASSISTANT), "a turn is str"),
        (chat(USER, ASSISTANT, system=3), "the system turn is int"),
        (chat(USER, ASSISTANT | {"reasoning_content": "hm"}), "a turn has reasoning_content"),
        (chat(USER | {"tool_calls": [{"name": "f"}]}, ASSISTANT), "a user turn has tool_calls"),
    ],
)
def test_a_row_that_cannot_be_learnt_as_written_says_why(raw: RawRow, reason: str) -> None:
    found = bad(raw.content, "chat")
    assert reason in str(found)
    assert str(found).isascii() or found.reason  # what is said can be written
    json.dumps(found.line("f: row 1"), ensure_ascii=False).encode()


def test_reasons_are_few_however_odd_the_rows(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": f"r{number}", "content": "q"}, ASSISTANT]} for number in range(50)]
    write_lines(tmp_path / "r.jsonl", rows)
    assert len({text.split(":")[0] for text in read(tmp_path, "r.jsonl")[1].values()}) == 1


def test_several_tools_may_answer_one_turn() -> None:
    found = canonical(chat(USER, ASSISTANT, TOOL, TOOL, ASSISTANT), "chat")
    assert [role for role, _ in found.messages] == ["user", "assistant", "tool", "tool", "assistant"]


# --- detection ----------------------------------------------------------------------------------


def raws(*contents: Any) -> list[RawRow]:
    return [RawRow(content, f"f: row {number}") for number, content in enumerate(contents, 1)]


def test_the_first_row_with_a_known_key_is_the_evidence() -> None:
    alpaca = {"instruction": "q", "output": "a", "text": "q a"}
    assert detect(raws("text", {"x": 1}, alpaca), "f") == ("alpaca", "row 3 has instruction")
    assert detect(raws({"prompt": "q", "completion": "a"}), "f") == (
        "completion",
        "row 1 has prompt and completion",
    )
    assert detect(raws({"conversations": []}), "f") == ("chat", "row 1 has conversations")
    assert detect(raws({"text": None}), "f") == ("text", "row 1 has text")
    assert detect(raws({"text": "a"}), "f", {}, "text") == ("text", "params.yaml says so")
    mixed = detect(raws(alpaca, {"messages": []}), "f")
    assert mixed == ("alpaca", "row 1 has instruction; but row 2 has messages (chat)")


def test_the_order_of_rows_decides_nothing(tmp_path: Path) -> None:
    rows = [
        {"instruction": "q", "output": "a"},
        {"messages": [USER, ASSISTANT, USER, ASSISTANT]},
        {"text": "t"},
    ]
    found = []
    for name, order in (("a.jsonl", rows), ("b.jsonl", rows[::-1])):
        write_lines(tmp_path / name, order)
        kept, wrong = read(tmp_path, name)
        assert not wrong
        found.append({one.id: one.kind for one in kept})
    assert found[0] == found[1] and sorted(found[0].values()) == ["chat", "chat", "text"]


@pytest.mark.parametrize(
    ("content", "columns", "form", "words"),
    [
        ({"a": 1, "b": 2}, {}, "auto", r"rows with a, b are of no known format; alpaca rows have"),
        (
            {"question": "q", "response": "a"},
            {},
            "auto",
            r"alpaca rows, set prepare_data\.columns: {instruction: question, output: response}",
        ),
        ({"body": "x"}, {}, "auto", r"if they are text rows, set prepare_data\.columns: {text: body}"),
        (
            {"instruction": "q", "response": "a"},
            {},
            "auto",
            r"need instruction and output, and its columns are instruction, response; "
            r"set prepare_data\.columns: {output: response}",
        ),
        ({"instruction": "q", "out": "a"}, {}, "alpaca", r"columns: {output: out}"),
        ({"talk": []}, {}, "chat", r"chat rows need messages, and its columns are talk; .* {messages: …}"),
        (
            {"question": "q", "answer": "a"},
            {"instruction": "questoin"},
            "auto",
            r"instruction: questoin is no column of f, which has answer, question; did you mean question\?",
        ),
        (
            {"instruction": "q", "output": "a"},
            {"system": "xyz"},
            "auto",
            r"system: xyz is no column of f.*name one",
        ),
        ("text", {}, "auto", "rows with no keys are of no known format"),
    ],
)
def test_a_missing_column_is_named_with_those_there_are_and_the_nearest(
    content: Any, columns: dict[str, str], form: Any, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        detect(raws(content), "f", columns, form)


def test_a_row_that_lacks_a_column_says_which_it_has() -> None:
    found = bad({"question": "q", "output": "a"}, "alpaca")
    assert found.fix == "set prepare_data.columns: {instruction: question}, or remove the row"
    assert "no Frage: columns question" in str(bad({"question": "q"}, "alpaca", instruction="Frage"))
