"""Tool calls, pictures, and what on_bad_row: repair mends."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.data.formats import RawRow, canonical
from tasks.data.rows import BadRow, ImageRef, Row
from tests.unit.reading import read, write_lines

USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
WEATHER = {
    "name": "weather",
    "description": "d",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def row(content: Any, repair: bool = False, **columns: str) -> Row:
    return canonical(RawRow(content, "f: row 1"), "auto", columns, repair)


def bad(content: Any, repair: bool = False) -> str:
    with pytest.raises(BadRow) as error:
        row(content, repair)
    assert error.value.fix
    return str(error.value)


# --- tools --------------------------------------------------------------------------------------


def call(name: str, arguments: Any, **more: Any) -> dict[str, Any]:
    return {**more, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_sharegpt_with_tools_calls_and_results() -> None:
    turns = [
        {"from": "human", "value": "how warm?"},
        {"from": "function_call", "value": json.dumps({"name": "weather", "arguments": {"city": "Köln"}})},
        {"from": "observation", "value": '{"degrees": 3}'},
        {"from": "gpt", "value": "3 degrees"},
    ]
    found = row({"conversations": turns, "tools": json.dumps([WEATHER])})
    assert json.loads(found.tools) == [{"type": "function", "function": WEATHER}]
    assert found.chat[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [call("weather", {"city": "Köln"})],
    }
    assert found.chat[2] == {"role": "tool", "content": '{"degrees": 3}', "name": "weather"}
    assert found.answer == "3 degrees"


def test_openai_messages_with_parallel_calls_whose_results_came_in_another_order() -> None:
    calls = [call("f", '{"x": null}', id="1"), call("g", "", id="2")]
    turns = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "two"}]},
        {"role": "tool", "tool_call_id": "1", "content": {"one": None}},
        ASSISTANT,
    ]
    found = row(
        {"messages": turns, "tools": [{"type": "function", "function": {"name": "f"}}, {"name": "g"}]}
    )
    assert found.chat[1]["tool_calls"] == [call("f", {"x": None}, id="1"), call("g", {}, id="2")]
    results = [{"role": "tool", "content": '{"one": null}', "name": "f", "tool_call_id": "1"}]
    results += [{"role": "tool", "content": "two", "name": "g", "tool_call_id": "2"}]
    assert found.chat[2:4] == results
    turns[2]["tool_call_id"] = "9"
    assert "a tool's result answers no call before it: '9' (allowed: 1, 2)" in bad({"messages": turns})


def test_other_ways_to_write_calls() -> None:
    wanted = [call("f", {"x": 1}), call("g", {})]
    said = [{"name": "f", "arguments": {"x": 1}}, {"name": "g"}]
    result = {"role": "tool", "content": "t"}
    in_one = {"from": "function_call", "value": json.dumps(said)}
    in_two = [{"from": "tool_call", "value": one} for one in said]
    legacy = {"role": "assistant", "content": "", "function_call": said[0]}
    for turns, calls in (([in_one], wanted), (in_two, wanted), ([legacy], wanted[:1])):
        found = row({"messages": [USER, *turns, *[result] * len(calls), ASSISTANT]})
        assert found.chat[1]["tool_calls"] == calls
        assert [turn.get("name") for turn in found.chat[2:-1]] == ["f", "g"][: len(calls)]
    last = row({"messages": [USER, in_one]})
    assert json.loads(last.answer) == wanted  # a row may end with a call


@pytest.mark.parametrize(
    ("turn", "more", "words"),
    [
        ({"from": "function_call", "value": "f(1)"}, {}, "a call that is no JSON"),
        ({"from": "function_call", "value": ""}, {}, "a call that is no JSON"),
        ({"from": "function_call", "value": "[3]"}, {}, "a tool call without a name: 3"),
        (
            {"from": "gpt", "value": "", "tool_calls": [call("f", "{x}")]},
            {},
            "arguments of a tool call that is no JSON",
        ),
        (
            {"from": "gpt", "value": "", "tool_calls": [call("f", [1])]},
            {},
            "arguments of a tool call are no object: [1]",
        ),
        ({"from": "gpt", "value": "a"}, {"tools": "[{"}, "tools that is no JSON"),
        ({"from": "gpt", "value": "a"}, {"tools": "3"}, "tools are no list: 3"),
        ({"from": "gpt", "value": "a"}, {"tools": ["f", 3]}, "tools that is no JSON"),
        ({"from": "gpt", "value": "a"}, {"tools": [{"description": "d"}]}, "a tool without a name"),
        ({"from": "gpt", "value": "a"}, {"tools": [{"name": "\ud800"}]}, "tools holds half a character"),
    ],
)
def test_tools_that_cannot_be_read(turn: Any, more: dict[str, Any], words: str) -> None:
    assert words in bad({"conversations": [USER, turn], **more})


def test_nulls_that_another_table_left_behind_go_and_those_that_mean_null_stay() -> None:
    parameters = {"properties": {"a": {"default": None, "enum": ["x", None], "items": None}, "b": None}}
    found = row(
        {"messages": [USER, ASSISTANT], "tools": [{"name": "f", "parameters": parameters, "strict": None}]}
    )
    assert json.loads(found.tools)[0]["function"] == {
        "name": "f",
        "parameters": {"properties": {"a": {"default": None, "enum": ["x", None]}}},
    }
    text = [{"name": "f", "parameters": json.dumps(parameters)}]
    assert row({"messages": [USER, ASSISTANT], "tools": text}).tools == found.tools


# --- pictures -----------------------------------------------------------------------------------

LOOK = {"role": "user", "content": "<image>what?"}
PNG = b"\x89PNG"


@pytest.mark.parametrize(
    ("columns", "images"),
    [
        ({"image": "a.jpg"}, [ImageRef("a.jpg")]),
        ({"images": "a.jpg"}, [ImageRef("a.jpg")]),
        ({"images": ["a.jpg"], "image": None}, [ImageRef("a.jpg")]),
        ({"images": '["a.jpg"]'}, [ImageRef("a.jpg")]),  # a cell of a CSV
        ({"images": "[draft] a.jpg"}, [ImageRef("[draft] a.jpg")]),
        ({"image": PNG}, [ImageRef("", PNG)]),
        ({"image": {"bytes": PNG, "path": "a.png"}}, [ImageRef("a.png", PNG)]),
        ({"image": {"path": "a.png"}}, [ImageRef("a.png")]),
        ({"images": [{"bytes": base64.b64encode(PNG).decode()}]}, [ImageRef("", PNG)]),
        ({"image": "data:image/png;base64," + base64.b64encode(PNG).decode()}, [ImageRef("", PNG)]),
        ({"image": "https://x.org/a.jpg"}, [ImageRef("https://x.org/a.jpg")]),
    ],
)
def test_pictures_said_in_every_way(columns: dict[str, Any], images: list[ImageRef]) -> None:
    assert list(row({"messages": [LOOK, ASSISTANT], **columns}).images) == images


@pytest.mark.parametrize(
    "parts",
    [
        [{"type": "image_url", "image_url": {"url": "a.jpg"}}, {"type": "text", "text": "what?"}],
        [{"type": "image", "image": "a.jpg"}, {"type": "text", "text": "what?"}],
        [{"type": "image", "path": "a.jpg"}, "what?"],
    ],
)
def test_pictures_among_a_turns_parts_have_their_mark_there(parts: Any) -> None:
    found = row({"messages": [{"role": "user", "content": parts}, ASSISTANT]})
    assert found.messages[0][1] == "<image>what?"
    assert found.images == (ImageRef("a.jpg"),)


def test_parts_without_a_path_stand_for_the_rows_own_pictures() -> None:
    parts = [{"type": "image"}, {"type": "text", "text": " or "}, {"type": "image"}]
    found = row({"messages": [{"role": "user", "content": parts}, ASSISTANT], "images": ["a.jpg", "b.jpg"]})
    assert found.messages[0][1] == "<image> or <image>"
    assert [image.place for image in found.images] == ["a.jpg", "b.jpg"]


def test_alpaca_rows_may_have_pictures() -> None:
    assert row({"instruction": "<image>what?", "output": "a", "image": "a.jpg"}).images == (
        ImageRef("a.jpg"),
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"messages": [LOOK, ASSISTANT], "images": []}, "1 mark, 0 images"),
        ({"messages": [LOOK, ASSISTANT], "image": None}, "1 mark, 0 images"),
        ({"messages": [LOOK, ASSISTANT], "images": ["a.jpg", "b.jpg"]}, "1 mark, 2 images"),
        ({"messages": [USER, ASSISTANT], "image": "some/long/path.jpg"}, "0 marks, 1 image"),
        ({"messages": [LOOK, ASSISTANT], "image": 3}, "an image that is neither path nor bytes: 3"),
        ({"messages": [LOOK, ASSISTANT], "image": {"bytes": None, "path": None}}, "neither path nor bytes"),
        ({"messages": [LOOK, ASSISTANT], "image": {"bytes": "no base64!"}}, "not base64"),
        ({"messages": [LOOK, ASSISTANT], "image": "data:image/png,xx"}, "a data URL that is not base64"),
        ({"messages": [LOOK, ASSISTANT], "image": "a.jpg", "images": ["a.jpg"]}, "both images and image"),
    ],
)
def test_pictures_and_marks_that_do_not_meet(content: Any, words: str) -> None:
    assert words in bad(content)


def test_a_text_may_speak_of_a_mark_where_no_pictures_are_meant() -> None:
    assert row({"messages": [{"role": "user", "content": "SVG's <image>?"}, ASSISTANT]}).images == ()


def test_pictures_in_a_parquet_struct(tmp_path: Path) -> None:
    rows = [
        {"messages": [LOOK, ASSISTANT], "images": [{"bytes": PNG, "path": None}]},
        {"messages": [USER, ASSISTANT], "images": None},
        {"messages": [LOOK, ASSISTANT], "images": [{"bytes": None, "path": "a.png"}]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "r.parquet")
    kept, wrong = read(tmp_path, "r.parquet")
    assert not wrong
    assert [list(one.images) for one in kept] == [[ImageRef("", PNG)], [], [ImageRef("a.png")]]


# --- repair -------------------------------------------------------------------------------------


def talk(*turns: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns], **more}


@pytest.mark.parametrize(
    ("content", "messages", "mended"),
    [
        (
            talk(("user", "q"), ("assistant", "a"), ("user", " \n"), ("assistant", None)),
            (("user", "q"), ("assistant", "a")),
            ("dropped an empty last turn", "dropped an empty last turn"),
        ),
        (
            talk(("system", ""), ("user", "q"), ("user", "r"), ("assistant", "a"), ("assistant", "b")),
            (("user", "q\nr"), ("assistant", "a\nb")),
            ("dropped an empty system turn", "joined two user turns", "joined two assistant turns"),
        ),
        (
            talk(("Human", "q"), (" model", "a")),
            (("user", "q"), ("assistant", "a")),
            ("read role human as user", "read role model as assistant"),
        ),
        (
            talk(("user", "q \ud83d"), ("assistant", 42)),
            (("user", "q \ufffd"), ("assistant", "42")),
            ("replaced half a character", "wrote a number as text"),
        ),
        (
            {
                "messages": "[{'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': None}, ['x']]"[
                    :-7
                ]
                + "]"
            },
            None,
            (),
        ),
        (
            {"messages": "[{'role': 'user', 'content': \"it's\"}, {'role': 'assistant', 'content': 'a'}]"},
            (("user", "it's"), ("assistant", "a")),
            ("read a Python list as JSON",),
        ),
        (
            talk(("user", "what?"), ("assistant", "a"), images=["a.jpg", "b.jpg"]),
            (("user", "<image><image>\nwhat?"), ("assistant", "a")),
            ("put <image> marks before the first question",),
        ),
    ],
)
def test_what_is_plain_is_mended_and_said_and_else_refused(
    content: Any, messages: Any, mended: tuple[str, ...]
) -> None:
    bad(content)
    if messages is None:
        bad(content, repair=True)
        return
    found = row(content, repair=True)
    assert (found.messages, found.mended) == (messages, mended)


def test_a_sound_row_is_not_touched_by_repair() -> None:
    content = talk(("system", "s"), ("user", "q "), ("assistant", " a"), ("user", "q"), ("assistant", "b"))
    assert row(content, repair=True) == row(content)
    assert row(content, repair=True).mended == ()


def test_a_call_is_kept_when_the_answer_before_it_is_joined_to_it() -> None:
    turns = [
        USER,
        ASSISTANT,
        {"from": "function_call", "value": '{"name": "f"}'},
        {"role": "tool", "content": "t"},
    ]
    content = {"messages": [*turns, {"role": "assistant", "content": "b"}]}
    assert "two assistant turns" in bad(content)
    found = row(content, repair=True)
    assert found.chat[1] == {"role": "assistant", "content": "a", "tool_calls": [call("f", {})]}
    assert found.mended == ("joined two assistant turns",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (talk(("user", "q"), ("assistant", "")), "no answer"),
        (talk(("user", "q"), ("assistant", "a"), ("user", "more?")), "no answer"),
        (talk(("assistant", "hi"), ("user", "q"), ("assistant", "a")), "no question at its start"),
        (talk(("boss", "q"), ("assistant", "a")), "unknown role"),
        (talk(("user", "caf\udce9"), ("assistant", "a")), "bytes that are not UTF-8"),
        (talk(("user", True), ("assistant", "a")), "bool, not text"),
    ],
)
def test_what_only_its_author_can_mend_stays_bad(content: Any, words: str) -> None:
    assert words in bad(content, repair=True)


def test_repairs_are_asked_for_in_params(tmp_path: Path) -> None:
    write_lines(tmp_path / "r.jsonl", [talk(("bot", "q"), ("ai", "a")), talk(("user", "q"), ("ai", "a"))])
    assert len(read(tmp_path, "r.jsonl")[1]) == 2
    kept, wrong = read(tmp_path, "r.jsonl", on_bad_row="repair")
    assert [one.mended for one in kept] == [("read role ai as assistant",)] and len(wrong) == 1
