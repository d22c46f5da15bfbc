"""prepare_data: every row accounted for, masks right, splits stable, wrong input named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.contracts import DataManifest
from tasks.data.docstrings import docstring_rows
from tasks.data.formats import RawRow, canonical, detect, read_file
from tasks.data.prepared import Split
from tasks.data.rows import BadRow, Row
from tasks.data.split import held_out, near_duplicates
from tasks.data.templates import encode
from tasks.errors import UserError
from tasks.paths import Paths
from tasks.prepare_data import prepare_data, source_changed
from tests import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("model") / "m")


def prepared(root: Path, model: Path, rows: Any, name: str = "rows.json", **changes: Any) -> DataManifest:
    file = root / "data" / "raw" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(rows if isinstance(rows, str) else json.dumps(rows), encoding="utf-8")
    keys = {"prepare_data.validation_fraction": 0.3, "prepare_data.near_duplicate_threshold": 1.0, **changes}
    keys = {"model.name_or_path": str(model), "prepare_data.source": f"data/raw/{name}", **keys}
    return prepare_data(tiny.params(**keys), Paths(root))


def alpaca(count: int) -> list[dict[str, str]]:
    return [{"instruction": f"count to {n}", "input": "", "output": f"it is {n * 7}"} for n in range(count)]


# --- formats ------------------------------------------------------------------------------------


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
    assert [raw.where for raw in read_file(path)] == [f"{path}: line 1", f"{path}: line 3"]


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
        read_file(tmp_path / name)


def test_a_missing_file_and_an_unknown_format_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_file(tmp_path / "gone.json")
    with pytest.raises(UserError, match="rows with a, b are of no known format"):
        detect([RawRow({"a": 1, "b": 2}, "")], "f.json")


# --- masks --------------------------------------------------------------------------------------


def test_answers_and_their_end_marks_are_learnt_and_nothing_else(model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    talk = Row(
        (("system", "S"), ("user", "one?"), ("assistant", "1 ü"), ("user", "two?"), ("assistant", "2")),
        "g",
        "w",
    )
    found = encode(tokenizer, talk, 500)
    rendered = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in talk.messages], tokenize=False
    )
    assert found.input_ids == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert all(label in (-100, token) for label, token in zip(found.labels, found.input_ids, strict=True))
    learnt = tokenizer.decode([label for label in found.labels if label != -100])
    assert learnt == "1 ü<|im_end|>2<|im_end|>"


def test_a_row_whose_answer_is_cut_off_is_bad_and_a_long_one_is_cut(model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    talk = Row((("user", "q" * 40), ("assistant", "a" * 40)), "g", "w")
    with pytest.raises(BadRow, match="no answer token within max_length=30"):
        encode(tokenizer, talk, 30)
    cut = encode(tokenizer, talk, 80)
    assert cut.truncated
    assert len(cut.input_ids) == len(cut.labels) == 80


# --- the stage ----------------------------------------------------------------------------------


def test_every_row_is_accounted_for(tmp_path: Path, model: Path) -> None:
    rows: list[Any] = [*alpaca(30), alpaca(1)[0], {"instruction": "q", "output": ""}, {"x": 1}]
    manifest = prepared(tmp_path, model, rows, **{"prepare_data.on_bad_row": "reject"})
    kept = manifest.train.rows + manifest.validation.rows
    assert manifest.rows_in == len(rows) == kept + sum(manifest.rejected.values())
    assert manifest.rejected["duplicate"] == 1
    lines = [json.loads(line) for line in Paths(tmp_path).rejected.read_text().splitlines()]
    assert {line["where"].rsplit(": ", 1)[1] for line in lines} == {"row 31", "row 32", "row 33"}
    assert all(line["reason"] and line["fix"] for line in lines)
    train = Split.open(Paths(tmp_path).prepared, "train")
    assert len(train) == manifest.train.rows
    assert int(train.lengths().sum()) == manifest.train.tokens
    assert int(train.target_counts().sum()) == manifest.train.target_tokens
    assert train.prompt(0)[-1]["role"] == "user"
    assert train.reference(0).startswith("it is")


def test_a_row_without_an_answer_stops_and_leaves_the_old_data(tmp_path: Path, model: Path) -> None:
    prepared(tmp_path, model, alpaca(20))
    before = Paths(tmp_path).manifest.read_bytes()
    with pytest.raises(UserError, match=r"rows\.json: row 3: no answer.*on_bad_row: reject"):
        prepared(tmp_path, model, [*alpaca(2), {"instruction": "q", "output": " "}])
    assert Paths(tmp_path).manifest.read_bytes() == before
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["base", "prepared", "raw"]


def test_bytes_depend_on_the_content_not_on_its_order(tmp_path: Path, model: Path) -> None:
    prepared(tmp_path / "one", model, alpaca(20))
    prepared(tmp_path / "two", model, list(reversed(alpaca(20))))
    for name in ("train.arrow", "validation.arrow"):
        assert (Paths(tmp_path / "one").prepared / name).read_bytes() == (
            Paths(tmp_path / "two").prepared / name
        ).read_bytes()


def test_too_few_rows_are_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(UserError, match=r"leaves no row .*validation_fraction"):
        prepared(tmp_path, model, alpaca(1))
    assert not Paths(tmp_path).prepared.exists()


def test_a_changed_source_is_noticed(tmp_path: Path, model: Path) -> None:
    prepared(tmp_path, model, alpaca(20))
    params = tiny.params(**{"model.name_or_path": str(model), "prepare_data.source": "data/raw/rows.json"})
    assert not source_changed(params, Paths(tmp_path))
    (tmp_path / "data" / "raw" / "rows.json").write_text(json.dumps(alpaca(21)))
    assert source_changed(params, Paths(tmp_path))


def test_a_tokenizer_without_template_is_refused(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "m")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="has no chat template"):
        prepared(tmp_path, folder, alpaca(20))


# --- split --------------------------------------------------------------------------------------


def simple(question: str, answer: str, group: str) -> Row:
    return Row((("user", question), ("assistant", answer)), group, "w")


def test_adding_rows_moves_no_old_row() -> None:
    rows = [simple(f"q{n}", "a", str(n)) for n in range(500)]
    before = {row.id: held_out(row, 0.2) for row in rows}
    assert 60 < sum(before.values()) < 140
    assert all(held_out(row, 0.2) == side for row, side in zip(rows, before.values(), strict=True))


def test_near_duplicates_are_found_and_others_left() -> None:
    text = "the quick brown fox jumps over the lazy dog and then it sleeps all day long in the warm sun"
    train = [simple("Tell me of the fox", text, "1")]
    like = simple("Tell me of the fox!", text + " again", "2")
    other = simple("What is two and two", "It is four, as everybody knows from school", "3")
    assert near_duplicates(train, [like, other], 0.8) == {like.id}


def test_docstring_rows_are_many_the_same_each_time_and_never_on_both_sides() -> None:
    rows = list(docstring_rows())
    assert len(rows) >= 2000
    assert [row.id for row in rows] == [row.id for row in docstring_rows()]
    assert all(row.answer.strip() and row.prompt[-1]["content"].strip() for row in rows)
    sides = {(row.group, held_out(row, 0.1)) for row in rows}
    assert len(sides) == len({group for group, _ in sides}), "rows about one docstring are on one side"
