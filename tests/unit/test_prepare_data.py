"""prepare_data: every row accounted for, masks right, splits stable, wrong input named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.contracts import DataManifest
from tasks.data.chosen_template import ensure_template, template_changed
from tasks.data.prepared import Split
from tasks.data.rows import BadRow, Row
from tasks.data.templates import encode
from tasks.errors import UserError
from tasks.paths import Paths
from tasks.prepare_data import inputs_changed, prepare_data, source_changed
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


def kept(manifest: DataManifest) -> int:
    return manifest.train.rows + manifest.validation.rows


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
    assert manifest.rows_in == len(rows) == kept(manifest) + sum(manifest.rejected.values())
    assert manifest.rejected["duplicate"] == 1
    lines = [json.loads(line) for line in Paths(tmp_path).rejected.read_text().splitlines()]
    assert [(line["file"], line["row"]) for line in lines] == [
        ("data/raw/rows.json", row) for row in (31, 32, 33)
    ]
    assert all(line["reason"] and line["fix"] for line in lines)
    assert manifest.balanced
    train = Split.open(Paths(tmp_path).prepared, "train")
    assert len(train) == manifest.train.rows
    assert int(train.lengths().sum()) == manifest.train.tokens
    assert int(train.target_counts().sum()) == manifest.train.target_tokens
    assert train.prompt(0).messages[-1]["role"] == "user"
    assert train.reference(0).startswith("it is")


def test_a_row_without_an_answer_stops_and_leaves_the_old_data(tmp_path: Path, model: Path) -> None:
    prepared(tmp_path, model, alpaca(20))
    before = Paths(tmp_path).manifest.read_bytes()
    with pytest.raises(UserError, match=r"rows\.json: row 3: no answer.*on_bad_row: reject"):
        prepared(tmp_path, model, [*alpaca(2), {"instruction": "q", "output": " "}])
    assert Paths(tmp_path).manifest.read_bytes() == before
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["base", "prepared", "raw"]


def test_two_workspaces_get_the_same_bytes(tmp_path: Path, model: Path) -> None:
    rows = [*alpaca(20), alpaca(1)[0], {"instruction": "q", "output": None}]
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        prepared(folder, model, rows, **{"prepare_data.on_bad_row": "reject"})
    one, two = (
        {file.name: file.read_bytes() for file in Paths(folder).prepared.iterdir()} for folder in folders
    )
    assert sorted(one) == ["manifest.json", "rejected.jsonl", "train.arrow", "validation.arrow"]
    assert one == two


def test_bytes_depend_on_the_content_not_on_its_order(tmp_path: Path, model: Path) -> None:
    prepared(tmp_path / "one", model, alpaca(20))
    prepared(tmp_path / "two", model, list(reversed(alpaca(20))))
    for name in ("train.arrow", "validation.arrow"):
        assert (Paths(tmp_path / "one").prepared / name).read_bytes() == (
            Paths(tmp_path / "two").prepared / name
        ).read_bytes()


def test_no_held_out_row_resembles_one_that_is_trained_on(tmp_path: Path, model: Path) -> None:
    text = "once upon a time a king had three sons and no daughter so he sent them far away"
    rows = [{"instruction": "Tell a tale", "output": f"{text} {word}"} for word in "abcdefghijklmnop"]
    manifest = prepared(
        tmp_path, model, [*rows, *alpaca(20)], **{"prepare_data.near_duplicate_threshold": 0.8}
    )
    assert manifest.rejected == {"near-duplicate of a training row": manifest.rows_in - kept(manifest)}
    assert manifest.rejected["near-duplicate of a training row"] > 0
    held = Split.open(Paths(tmp_path).prepared, "validation")
    assert not any(text in held.reference(row) for row in range(len(held)))


def test_long_rows_are_cut_and_counted(tmp_path: Path, model: Path) -> None:
    rows = [*alpaca(20), {"instruction": "long", "output": "a" * 300}]
    manifest = prepared(tmp_path, model, rows, **{"prepare_data.max_length": 128})
    assert manifest.truncated == 1
    assert max(manifest.train.longest, manifest.validation.longest) == 128
    assert sum(bin_.rows for bin_ in manifest.length_histogram) == kept(manifest) == 21
    assert manifest.length_histogram[-1].upper == 128


def test_a_row_cut_before_its_answer_stops_or_is_counted(tmp_path: Path, model: Path) -> None:
    rows = [*alpaca(20), {"instruction": "q" * 200, "output": "a"}]
    changes = {"prepare_data.max_length": 128}
    with pytest.raises(UserError, match=r"row 21: no answer token within max_length=128.*reject"):
        prepared(tmp_path, model, rows, **changes)
    assert not Paths(tmp_path).prepared.exists()
    manifest = prepared(tmp_path, model, rows, **changes, **{"prepare_data.on_bad_row": "reject"})
    assert manifest.rejected == {"no answer token within max_length=128": 1}
    assert manifest.rows_in == 21 == kept(manifest) + 1


def test_rows_beyond_max_rows_are_not_counted(tmp_path: Path, model: Path) -> None:
    manifest = prepared(tmp_path, model, [*alpaca(20), {"x": 1}], **{"prepare_data.max_rows": 20})
    assert manifest.rows_in == 20 == kept(manifest)


def test_all_rows_rejected_is_an_error_that_counts_them(tmp_path: Path, model: Path) -> None:
    rows = [{"instruction": "q", "output": ""}] * 3
    with pytest.raises(UserError, match=r"leaves no row to train on \(left out: 3 no answer\)"):
        prepared(
            tmp_path, model, rows, **{"prepare_data.on_bad_row": "reject", "prepare_data.max_rejected": 1.0}
        )


def test_a_source_outside_data_raw_is_used_and_said(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared(tmp_path, model, alpaca(20))
    assert "outside data/raw/" not in capsys.readouterr().err
    (tmp_path / "mine.json").write_text(json.dumps(alpaca(20)))
    prepared(tmp_path, model, alpaca(20), **{"prepare_data.source": "mine.json"})
    assert "mine.json lies outside data/raw/" in capsys.readouterr().err


def test_a_wrong_source_ends_the_stage_with_code_2_before_the_model_is_touched(tmp_path: Path) -> None:
    tiny.write_params(tmp_path, **{"prepare_data.source": "data/raw/gone.jsonl"})
    ran = subprocess.run(
        [sys.executable, "-m", "tasks.prepare_data"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tiny.REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 2
    assert ran.stderr.startswith("prepare_data: prepare_data.source=data/raw/gone.jsonl does not exist; give")
    assert ran.stderr.count("\n") == 1
    assert not (tmp_path / "data").exists()


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


def test_a_tokenizer_without_template_is_given_its_familys_or_refused(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "m")
    (folder / "chat_template.jinja").unlink()
    prepared(tmp_path, folder, alpaca(20))
    base = Paths(tmp_path).base
    assert "<|im_start|>" in (base / "chat_template.jinja").read_text()
    mine = tmp_path / "mine.jinja"
    mine.write_text("{% for message in messages %}[{{ message['content'] }}]{% endfor %}")
    changes = {"prepare_data.template": "mine.jinja"}
    prepared(tmp_path, folder, alpaca(20), **changes)
    assert (base / "chat_template.jinja").read_text() == mine.read_text()
    params = tiny.params(**changes | {"prepare_data.source": "data/raw/rows.json"})
    assert not template_changed(params, Paths(tmp_path)) and not inputs_changed(params, Paths(tmp_path))
    mine.write_text(mine.read_text() + " ")
    assert template_changed(params, Paths(tmp_path)) and inputs_changed(params, Paths(tmp_path))
    with pytest.raises(UserError, match="template=other is unknown"):
        prepared(tmp_path, folder, alpaca(20), **{"prepare_data.template": "other"})
    prepared(tmp_path, folder, alpaca(20))
    assert "<|im_start|>" in (base / "chat_template.jinja").read_text()
    for file in (base / "tokenizer.json", base / "tokenizer_config.json"):
        file.write_text(file.read_text().replace("<|im_start|>", "<|other|>"))
    config = base / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"unheard"'))
    ensured = ensure_template(tiny.params(**{"model.name_or_path": str(folder)}), Paths(tmp_path))
    assert ensured is None and not (base / "chat_template.jinja").exists()


def test_a_models_own_template_comes_back_and_its_end_mark_ends_answers(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "m")
    base = Paths(tmp_path).base
    ends = folder / "generation_config.json"
    ends.write_text(json.dumps({"eos_token_id": 0, "do_sample": False}))
    own = (folder / "chat_template.jinja").read_text()
    prepared(tmp_path, folder, alpaca(20), **{"prepare_data.template": "qwen"})
    assert "You are a helpful assistant." in (base / "chat_template.jinja").read_text()
    assert json.loads((base / "generation_config.json").read_text()) == {
        "eos_token_id": [0, 2],
        "do_sample": False,
    }
    prepared(tmp_path, folder, alpaca(20))
    assert (base / "chat_template.jinja").read_text() == own
    assert json.loads((base / "generation_config.json").read_text())["eos_token_id"] == [0, 2]


def test_a_copy_of_the_models_own_template_is_watched_too(tmp_path: Path, model: Path) -> None:
    mine = tmp_path / "mine.jinja"
    mine.write_bytes((model / "chat_template.jinja").read_bytes())
    changes = {"prepare_data.template": "mine.jinja", "prepare_data.source": "data/raw/rows.json"}
    prepared(tmp_path, model, alpaca(20), **changes)
    params, paths = tiny.params(**changes), Paths(tmp_path)
    assert not inputs_changed(params, paths)
    mine.write_text(mine.read_text().replace("|im_start|", "|im_end|"))
    assert inputs_changed(params, paths)
    mine.unlink()
    assert inputs_changed(params, paths), "the stage says that it is gone"


def ids(folder: Path, name: str) -> set[str]:
    return set(Split.open(folder, name).table.column("id").to_pylist())


def test_adding_rows_moves_no_old_row(tmp_path: Path, model: Path) -> None:
    prepared(tmp_path, model, alpaca(60))
    folder = Paths(tmp_path).prepared
    before = {name: ids(folder, name) for name in ("train", "validation")}
    prepared(tmp_path, model, alpaca(120))
    for name, old in before.items():
        assert old < ids(folder, name)
    assert 0.15 < len(ids(folder, "validation")) / 120 < 0.45
