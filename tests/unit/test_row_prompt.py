"""Answers are generated behind the text that a row was learnt with: by the template, without one, or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tasks.commands.chat import chat
from tasks.commands.generate import as_learnt
from tasks.contracts import EvalReport, Samples
from tasks.data.prepared import IGNORED, Split
from tasks.data.row_prompt import Prompt, prompt_ids, prompt_of
from tasks.data.rows import Row
from tasks.data.templates import Encoder
from tasks.errors import UserError
from tasks.evaluate import evaluate
from tasks.paths import Paths
from tasks.prepare_data import prepare_data
from tests import tiny
from tests.unit import legacy_cases
from tests.unit.reading import write_lines
from tests.unit.test_data_templates import TOOLS, adds_begin_token
from tests.unit.test_data_words import KINDS, SPACED, byte_level, spaced

pytestmark = pytest.mark.usefixtures("one_thread")

LOOK = '[{"type": "function", "function": {"name": "look", "parameters": {"at": "sky"}}}]'


def completion(prompt: str, answer: str) -> Row:
    return Row((("user", prompt), ("assistant", answer)), "g", "w", "completion")


@pytest.mark.parametrize("begins", [False, True], ids=["", "begin token"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_begins_behind_the_ids_that_were_learnt(kind: str, begins: bool) -> None:
    tokenizer: Any = spaced(kind) if kind in SPACED else byte_level(kind)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    if begins:
        adds_begin_token(tokenizer)
    texts = [*legacy_cases.TEXT[:3], "2+2=", "Q: a?\nA: ", "<|im_start|>mine "]
    rows = [completion(text, "4, ü 你好") for text in texts]
    tokenizer.chat_template = TOOLS
    talk = (("system", "s"), ("user", "one"), ("assistant", "1"), ("user", "two"), ("assistant", "2"))
    rows += [Row(talk, "g", "w"), Row(talk, "g", "w", tools=LOOK)]
    encoder = Encoder(tokenizer, None, 4000, "last")
    tokenizer.chat_template = encoder._template.text  # with what ensure_template finishes it by
    asked = prompt_ids(tokenizer, [Prompt.read(prompt_of(row)) for row in rows])
    for row, found, prompt in zip(rows, encoder.encode(rows), asked, strict=True):
        first = int(np.flatnonzero(np.asarray(found.labels) != IGNORED)[0])
        assert prompt == list(found.input_ids)[:first], row
    assert len(asked[-1]) > len(asked[-2]), "the template is told of the tools"


def test_a_text_has_no_prompt() -> None:
    text = Row((("assistant", "all of it is learnt"),), "g", "w", "text")
    assert Prompt.read(prompt_of(text)) is None
    assert Prompt.read(prompt_of(completion('a "\n\u2028', "b"))).shown == 'a "\n\u2028'
    assert Prompt.read('[{"role": "user", "content": "q"}]').shown == "q" and Prompt.read("[]") is None
    assert Prompt([{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]).shown == "s\nq"


# --- the stage and the commands -----------------------------------------------------------------

CHATS = [{"instruction": f"count to {n}", "output": f"it is {n * 7}"} for n in range(30)]
COMPLETIONS = [{"prompt": f"{n} and {n} are", "completion": f" {n + n}."} for n in range(30)]
TEXTS = [{"text": f"Line {n} of a text that goes on."} for n in range(30)]


def workspace(root: Path, rows: list[dict[str, str]]) -> tuple[Any, Paths]:
    """Prepared rows and, in the trainer's place, a random adapter: (params, paths)."""
    paths = Paths(root)
    write_lines(root / "data" / "raw" / "rows.jsonl", rows)
    model = tiny.write_model(root / "m")
    params = tiny.params(
        **{
            "model.name_or_path": str(model),
            "prepare_data.source": "data/raw/rows.jsonl",
            "prepare_data.validation_fraction": 0.3,
            "prepare_data.near_duplicate_threshold": 1.0,
            "evaluate.samples": 3,
            "evaluate.max_new_tokens": 4,
        }
    )
    prepare_data(params, paths)
    return params, paths


def evaluated(root: Path, rows: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """(report, samples, the ids that answers were generated behind)."""
    from peft import LoraConfig, get_peft_model

    params, paths = workspace(root, rows)
    tokenizer = AutoTokenizer.from_pretrained(paths.base)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(root / "m"), LoraConfig(target_modules="all-linear")
    )
    final = SimpleNamespace(
        run_key="k", content_hash="c", finetuning_type="lora", embeddings_trained=False, base=None
    )
    monkeypatch.setattr("tasks.trainer.loading.read_final", lambda paths: final)
    monkeypatch.setattr("tasks.trainer.loading.load_tuned", lambda paths: (model, tokenizer))
    behind: list[list[int]] = []
    from tasks.trainer import inference

    forward = inference._generate
    monkeypatch.setattr(inference, "_generate", lambda *given: behind.extend(given[2]) or forward(*given))
    report = evaluate(params, paths)
    assert EvalReport.read(paths.eval_report) == report
    return report, Samples.read(paths.samples), behind, paths


def learnt_behind(paths: Paths, row: int) -> list[int]:
    ids, labels = Split.open(paths.prepared, "validation").tokens(row)
    return ids[: int(np.flatnonzero(labels != IGNORED)[0])].tolist()


def test_completions_are_continued_without_a_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report, samples, behind, paths = evaluated(tmp_path, COMPLETIONS, monkeypatch)
    assert report.rows > 3 and not samples.note
    assert behind == 2 * [learnt_behind(paths, row) for row in range(3)]
    assert all(one.prompt.endswith(" are") and one.reference.startswith(" ") for one in samples.samples)
    tokenizer = AutoTokenizer.from_pretrained(paths.base)
    assert as_learnt(paths, tokenizer, ["2 and 2 are"]) == [Prompt(text="2 and 2 are")]
    assert "continued as they stand" in capsys.readouterr().err


def test_plain_texts_count_by_their_loss_alone_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report, samples, behind, paths = evaluated(tmp_path, TEXTS, monkeypatch)
    assert report.rows > 3 and report.base.loss == report.tuned.loss > 0
    assert not samples.samples and not behind
    assert samples.note.startswith("all held-out rows are plain text, which follows no prompt")
    assert f"evaluate: {samples.note}" in capsys.readouterr().err
    assert as_learnt(paths, AutoTokenizer.from_pretrained(paths.base), ["Line"]) == [Prompt(text="Line")]


def test_among_texts_the_rows_with_a_prompt_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, samples, behind, paths = evaluated(tmp_path, [*TEXTS, *CHATS], monkeypatch)
    split = Split.open(paths.prepared, "validation")
    asked = [row for row in range(report.rows) if split.prompt(row) is not None][:3]
    before = [row for row in range(asked[-1]) if split.prompt(row) is None]
    assert behind == 2 * [learnt_behind(paths, row) for row in asked] and before
    assert samples.note.startswith(f"{len(before)} of the first held-out rows are plain text")
    question = [{"role": "user", "content": "Line"}]
    assert as_learnt(paths, AutoTokenizer.from_pretrained(paths.base), [" Line\n"]) == [Prompt(question)]


def test_without_a_template_texts_are_continued_and_no_conversation_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = None
    assert as_learnt(Paths(tmp_path), tokenizer, ["One,"]) == [Prompt(text="One,")]
    monkeypatch.setattr("tasks.commands.chat.loaded", lambda paths, folder: (None, tokenizer))
    with pytest.raises(UserError, match=r"no chat template.*`elastane generate`"):
        chat(tiny.params(), Paths(tmp_path))


def test_what_is_written_beside_a_row_can_be_read_by_anyone(tmp_path: Path) -> None:
    _, paths = workspace(tmp_path, CHATS)
    column = Split.open(paths.prepared, "validation").table.column("prompt")
    assert [*json.loads(column[0].as_py())] == ["messages"]
