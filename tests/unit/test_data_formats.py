"""Rows of any file: what is refused and why, and that nothing is dropped without a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.data.formats import RawRow, canonical, detect, read_file, read_hub, rows_hash
from tasks.data.rows import BadRow, Row
from tasks.errors import UserError

USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TOOL = {"role": "tool", "content": "t"}


def chat(*turns: Any, **more: Any) -> RawRow:
    return RawRow({"messages": list(turns), **more}, "f: row 1")


def row(content: Any, form: str = "alpaca") -> Row:
    return canonical(RawRow(content, "f: row 1"), form)  # type: ignore[arg-type]


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


@pytest.mark.parametrize(
    "content",
    [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    ],
)
def test_both_chat_styles(content: Any) -> None:
    assert detect([RawRow(content, "")], "f")[0] == "chat"
    assert row(content, "chat").messages == (("user", "q"), ("assistant", "a"))


@pytest.mark.parametrize(
    ("content", "form", "reason"),
    [
        ({"instruction": "q", "output": ""}, "alpaca", "no answer"),
        ({"instruction": "q"}, "alpaca", "no answer"),
        ({"instruction": "q", "output": 3}, "alpaca", "int, not text"),
        ({"instruction": None, "output": "a"}, "alpaca", "instruction is NoneType"),
        ({"instruction": "q", "output": "a", "history": "x"}, "alpaca", "history"),
        ("just text", "alpaca", "str instead of a row"),
        ({"messages": [{"role": "user", "content": "q"}]}, "chat", "no answer"),
        ({"messages": []}, "chat", "no question"),
        ({"messages": [{"role": "boss", "content": "q"}]}, "chat", "unknown role 'boss'"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "chat", "no question"),
        ({"messages": "q"}, "chat", "messages is str"),
    ],
)
def test_bad_rows_have_a_reason(content: Any, form: str, reason: str) -> None:
    with pytest.raises(BadRow) as error:
        row(content, form)
    assert reason in error.value.reason
    assert error.value.fix


def test_jsonl_with_bom_and_crlf(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(
        '\ufeff{"instruction": "q", "output": "é"}\r\n\r\n{"instruction": "r", "output": "b"}\r\n'.encode()
    )
    assert [raw.where for raw in read_file(path, "r.jsonl")] == ["r.jsonl: line 1", "r.jsonl: line 3"]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "", "is empty"),
        ("a.json", "[]", "holds no rows"),
        ("a.json", '{"instruction": "q"}', "not a list"),
        ("a.json", "[{]", "not valid JSON at line 1"),
        ("a.jsonl", '{"a": 1}\n{broken\n', "line 2 is not valid JSON"),
        ("a.csv", "a,b", "ends in .csv"),
    ],
)
def test_files_that_cannot_be_read_name_themselves(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=words):
        read_file(tmp_path / name, name)


def test_a_missing_file_and_an_unknown_format_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_file(tmp_path / "gone.json", "gone.json")
    with pytest.raises(UserError, match="rows with a, b are of no known format"):
        detect([RawRow({"a": 1, "b": 2}, "")], "f.json")


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (chat(USER, USER, ASSISTANT), "two user turns in a row"),
        (chat(USER, ASSISTANT, ASSISTANT), "two assistant turns in a row"),
        (chat(USER, TOOL, ASSISTANT), "a tool turn right after a user turn"),
        (chat(USER, ASSISTANT, TOOL, USER, ASSISTANT), "a user turn right after a tool turn"),
        (chat(USER, ASSISTANT, {"role": "system", "content": "s"}, USER, ASSISTANT), "not the first"),
        (chat(USER, ASSISTANT, USER), "no answer"),
        (chat({"role": ["user"], "content": "q"}, ASSISTANT), "unknown role ['user']"),
        (chat({"role": "user", "content": [{"type": "text"}]}, ASSISTANT), "the user turn is list, not text"),
        (chat({"role": "user", "content": "\ud800"}, ASSISTANT), "lone surrogate"),
        (chat("q", ASSISTANT), "a turn is str"),
        (chat(USER, ASSISTANT, system=3), "the system turn is int"),
        (chat(USER, ASSISTANT, images=["a.jpg"]), "it has images"),
        (chat(USER, ASSISTANT, tools='[{"name": "f"}]'), "it has tools"),
        (chat(USER, {"role": "assistant", "content": None, "tool_calls": [{}]}), "it has tool_calls"),
    ],
)
def test_a_row_that_cannot_be_learnt_as_written_says_why(raw: RawRow, reason: str) -> None:
    with pytest.raises(BadRow) as error:
        canonical(raw, "chat")
    assert reason in error.value.reason
    assert error.value.fix


@pytest.mark.parametrize("tools", ["[]", "", None, []])
def test_empty_extras_are_no_reason_to_refuse(tools: Any) -> None:
    assert canonical(chat(USER, ASSISTANT, tools=tools), "chat").answer == "a"


def test_several_tools_may_answer_one_turn() -> None:
    row = canonical(chat(USER, ASSISTANT, TOOL, TOOL, ASSISTANT), "chat")
    assert [role for role, _ in row.messages] == ["user", "assistant", "tool", "tool", "assistant"]


def test_conversations_are_read_where_messages_is_null() -> None:
    raw = RawRow({"messages": None, "conversations": [USER, ASSISTANT]}, "f: row 1")
    assert canonical(raw, "chat").messages == (("user", "q"), ("assistant", "a"))


def test_an_instruction_may_stand_in_input_alone() -> None:
    raw = RawRow({"instruction": "", "input": "X", "output": "O"}, "f: row 1")
    assert canonical(raw, "alpaca").messages[0] == ("user", "X")


def test_the_first_row_with_a_known_key_decides_and_is_the_evidence() -> None:
    rows = [
        RawRow("text", "f: row 1"),
        RawRow({"x": 1}, "f: row 2"),
        RawRow({"instruction": "q", "output": "a"}, "f: row 3"),
    ]
    assert detect(rows, "f") == ("alpaca", "row 3 has instruction")


def test_a_folder_is_named_as_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rows\.jsonl is a folder; give one \.json"):
        read_file(tmp_path, "rows.jsonl")


def test_a_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_bytes('[{"instruction": "é"}]'.encode("latin-1"))
    with pytest.raises(UserError, match=r"r\.json is not UTF-8 at byte 18; save it as UTF-8"):
        read_file(tmp_path / "r.json", "r.json")


def test_a_data_set_is_read_from_its_train_split(tmp_path: Path) -> None:
    """A folder stands for the hub: `load_dataset` treats both alike."""
    rows = [{"instruction": f"q{n}", "output": "a"} for n in range(5)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_hub(str(tmp_path), 3)
    assert [row.content for row in found] == rows[:3]
    assert found[2].where == f"{tmp_path}: row 3"
    assert rows_hash(found) == rows_hash([RawRow(row, "elsewhere") for row in rows[:3]])
    assert rows_hash(found) != rows_hash(read_hub(str(tmp_path), None))


def test_a_data_set_that_cannot_be_fetched_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"=nobody/nothing is no file here .* give a local \.json"):
        read_hub("nobody/nothing", None)
