"""What went wrong for users of other tools (public reports): the rows of theirs that end in the canonical row."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from tasks.data.formats import canonical
from tasks.data.shards import read_shard, shards_of
from tasks.data.templates import Encoder
from tests import tiny
from tests.unit.reading import read, source, write_lines

TURNS = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def test_a_role_that_nobody_knows_is_one_bad_row_with_its_place(tmp_path: Path) -> None:
    """hiyouga/LlamaFactory#6878: a role outside the tags ended in a bare KeyError."""
    rows = [
        {"conversations": [{"from": role, "value": "q"}, TURNS[1]]} for role in ("human", "boss", "human")
    ]
    (tmp_path / "r.json").write_text(json.dumps(rows))
    kept, bad = read(tmp_path, "r.json")
    assert [row.where for row in kept] == ["r.json: row 1", "r.json: row 3"]
    assert list(bad) == ["r.json: row 2"]
    assert "unknown role: 'boss' in turn 1 (allowed: human, user, gpt, assistant" in bad["r.json: row 2"]


@pytest.mark.parametrize("odd", ["", None, 3, ["human"], {"a": 1}, "user ", "HUMAN", "\ud800"])
def test_any_other_value_in_place_of_a_role_too(tmp_path: Path, odd: Any) -> None:
    rows = [
        {"conversations": TURNS},
        {"conversations": [{"from": odd, "value": "q"}, TURNS[1]]},
        {"conversations": TURNS},
    ]
    (tmp_path / "r.json").write_text(json.dumps(rows))
    kept, bad = read(tmp_path, "r.json")
    assert len(kept) == 2 and bad["r.json: row 2"].startswith("unknown role: ")


@pytest.mark.parametrize("key", ["image", "images"])
def test_a_path_is_one_picture_not_as_many_as_it_has_letters(tmp_path: Path, key: str) -> None:
    """hiyouga/LlamaFactory#5883."""
    look = [{"role": "user", "content": "<image> what?"}, MESSAGES[1]]
    rows: list[dict[str, Any]] = [{"messages": look, key: image} for image in ("a.jpg", ["a.jpg"])]
    rows.append({"messages": MESSAGES, key: "a.jpg"})
    write_lines(tmp_path / "r.jsonl", rows)
    kept, bad = read(tmp_path, "r.jsonl")
    assert kept[0].id == kept[1].id
    assert [len(row.images) for row in kept] == [1, 1]
    assert bad["r.jsonl: line 3"].endswith("0 marks, 1 image")


@pytest.mark.parametrize("many", [6000, pytest.param(300_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("missing", ["null", "absent"])
def test_a_column_that_begins_empty_loads_in_any_order(tmp_path: Path, missing: str, many: int) -> None:
    """huggingface/datasets#7222: null for long, then text; other libraries fix the type by the first block.

    6,000 rows of 240 bytes are several blocks of any reader that looks at one block; the report's own are 300,000.
    """
    empty: dict[str, Any] = {"instruction": "q", "output": "o" * 200} | (
        {"system": None} if missing == "null" else {}
    )
    filled = {"instruction": "q", "output": "a", "system": "s"}
    found = []
    for name, rows in (("late.jsonl", [empty] * many + [filled]), ("early.jsonl", [filled] + [empty] * many)):
        write_lines(tmp_path / name, rows)
        source_ = source(tmp_path, name)
        ids = Counter(
            canonical(row, source_.form, source_.columns).id
            for shard in shards_of([source_], 1 << 20)
            for row in read_shard(shard)
        )
        assert sorted(ids.values()) == [1, many]
        found.append(ids)
    assert found[0] == found[1]


def test_types_that_change_between_rows_harm_only_their_own_row(tmp_path: Path) -> None:
    odd = [{"a": 1}, [1, "x"], "s", 3, 1.5, True, None, {"b": {"c": []}}]
    for name, order in (("a.jsonl", odd), ("b.jsonl", odd[::-1])):
        rows = [{"instruction": "q", "output": "a", "meta": value, "nested": {"k": value}} for value in order]
        rows.append({"instruction": "q", "output": order[0]})
        write_lines(tmp_path / name, rows)
        kept, bad = read(tmp_path, name)
        assert len(kept) == len(odd)
        assert list(bad) == [f"{name}: line {len(odd) + 1}"]


@pytest.mark.parametrize("name", ["r.jsonl", "r.json", "r.csv"])
def test_a_byte_order_mark_changes_nothing(tmp_path: Path, name: str) -> None:
    """huggingface/datasets#8241: with the mark, other nulls."""
    rows = [
        {"messages": MESSAGES, "tools": [{"name": "f", "parameters": {key: {"type": "string"}}}]}
        for key in "ab"
    ]
    if name == "r.csv":
        text = "messages,tools\n" + "".join(
            ",".join('"' + json.dumps(row[key]).replace('"', '""') + '"' for key in ("messages", "tools"))
            + "\n"
            for row in rows
        )
    else:
        text = json.dumps(rows) if name == "r.json" else "".join(json.dumps(row) + "\n" for row in rows)
    found = []
    for folder, mark in (("with", "\ufeff"), ("without", "")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(mark + text, encoding="utf-8")
        kept, bad = read(tmp_path / folder, name)
        assert not bad
        found.append([(row, row.id) for row in kept])
    assert found[0] == found[1] and len(found[0]) == 2


def tool_rows() -> list[dict[str, Any]]:
    def tool(name: str, parameter: str) -> dict[str, Any]:
        properties = {parameter: {"type": "string", "description": f"the {parameter}"}}
        return {
            "name": name,
            "parameters": {"type": "object", "properties": properties, "required": [parameter]},
        }

    rows = [
        {"messages": MESSAGES, "tools": [tool("first", "aaa")]},
        {"messages": MESSAGES, "tools": [tool("second", "bbb")]},
    ]
    rows.append(
        {
            "messages": MESSAGES,
            "tools": [{"name": "third", "parameters": {"type": "object", "properties": {}}}],
        }
    )
    return rows


def write_tools(path: Path) -> None:
    rows = tool_rows()
    if path.suffix == ".jsonl":
        write_lines(path, rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as out:
            out.write_table(table)


@pytest.mark.parametrize("name", ["r.jsonl", "r.json", "r.parquet", "r.arrow"])
def test_a_tool_has_its_own_parameters_only(tmp_path: Path, name: str) -> None:
    """modelscope/ms-swift#10125: in a table every tool has the other tools' parameters, as null."""
    write_tools(tmp_path / name)
    kept, bad = read(tmp_path, name)
    assert not bad
    for row, written, other in zip(kept, tool_rows(), ("bbb", "aaa", "aaa"), strict=True):
        assert json.loads(row.tools) == [{"type": "function", "function": written["tools"][0]}]
        assert other not in row.tools and "null" not in row.tools and "None" not in row.tools


BY_PARAMETER = (
    "{% for tool in tools or [] %}{{ tool.function.name }}("
    "{% for name, of in tool.function.parameters.properties.items() %}"
    "{{ name }}: {{ of.type }} # {{ of.description }}{% endfor %})\n{% endfor %}" + tiny.CHATML
)
DUMPED = "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}" + tiny.CHATML


@pytest.mark.parametrize("template", [BY_PARAMETER, DUMPED], ids=["by parameter", "dumped"])
@pytest.mark.parametrize("name", ["r.jsonl", "r.json", "r.parquet", "r.arrow"])
def test_a_prompt_names_the_parameters_of_its_own_tool_only(tmp_path: Path, name: str, template: str) -> None:
    """modelscope/ms-swift#10125: the others' leaked into the rendered prompt, as null or None."""
    write_tools(tmp_path / name)
    kept, bad = read(tmp_path, name)
    tiny.write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    found = Encoder(tokenizer, template, 4000, "answers").encode(kept)
    prompts = [tokenizer.decode(one.input_ids) for one in found]
    assert not bad and len(prompts) == 3
    for prompt, tool, own in zip(prompts, ("first", "second", "third"), ("aaa", "bbb", ""), strict=True):
        assert tool in prompt and prompt.endswith("a<|im_end|>\n") and (not own or f"the {own}" in prompt)
        for other in {"aaa", "bbb", "null", "None"} - {own}:
            assert other not in prompt


def test_arguments_of_calls_do_not_mix_in_a_table_either(tmp_path: Path) -> None:
    def talk(arguments: dict[str, Any]) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        turns: list[Any] = [MESSAGES[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
        return {"messages": [*turns, {"role": "tool", "content": "t"}, MESSAGES[1]]}

    rows = [talk({"a": 1, "deep": {"x": [1]}}), talk({"b": "two", "deep": {"y": True}})]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "r.parquet")
    write_lines(tmp_path / "r.jsonl", rows)
    from_table, from_lines = (read(tmp_path, name)[0] for name in ("r.parquet", "r.jsonl"))
    # the order of keys is the table's
    assert [row.chat for row in from_table] == [row.chat for row in from_lines]
    assert json.loads(from_table[0].calls[0][1])[0]["function"]["arguments"] == {"a": 1, "deep": {"x": [1]}}


DATASETS = """
import sys
from datasets import load_dataset
table = load_dataset("json", data_files=sys.argv[1], split="train", cache_dir=sys.argv[2])
table.save_to_disk(sys.argv[3])
"""


def test_tools_that_another_library_saved_as_a_table(tmp_path: Path) -> None:
    write_tools(tmp_path / "r.json")
    command = [sys.executable, "-c", DATASETS, "r.json", "cache", "saved"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    kept, bad = read(tmp_path, "saved")
    assert not bad
    for row, (number, written) in zip(kept, enumerate(tool_rows()), strict=True):
        assert json.loads(row.tools)[0]["function"] == written["tools"][0], number
