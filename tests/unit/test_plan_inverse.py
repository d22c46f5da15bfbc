"""`elastane plan` the other way round: smallest machines, largest models, longest rows."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from flows.cli import app
from tasks.commands.plan_inverse import KINDS, _last, largest, what_hardware
from tasks.commands.plan_question import Question, ask
from tasks.commands.plan_text import inverse_lines
from tasks.errors import UserError
from tasks.planner.nearest import first_fit


def run(*words: str) -> str:
    done = CliRunner().invoke(app, ["plan", *words])
    if isinstance(done.exception, UserError):
        raise done.exception
    assert done.exit_code == 0
    return done.stdout


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """A folder without params.yaml, and no rates of this machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ELASTANE_CACHE", str(tmp_path / "cache"))


def test_the_smallest_machines_are_found():
    found = what_hardware(Question("llama-2-7b", method="lora", sequence=1024, batch=16), None).lines
    assert len(found) == len(KINDS) and all(line.best is not None for line in found)
    assert "1xA100-80G" in {line.what for line in found}
    full = what_hardware(Question("llama-3.1-70b", method="full", sequence=1024, batch=64), None)
    sizes = {line.what.split(" ")[0][0] for line in full.lines if line.best is not None}
    assert sizes and "1" not in sizes
    assert all(re.search(r"tokens/s|nothing fits", line) for line in inverse_lines(full)[-len(KINDS) :])


def test_a_pin_that_needs_more_gpus_is_answered_by_larger_machines():
    found = what_hardware(Question("llama-2-7b", method="lora", sequence=512, batch=16), None).lines
    pinned = Question("llama-2-7b", method="lora", sequence=512, batch=16)
    tensor = what_hardware(replace(pinned, pins=replace(pinned.pins, tp=4)), None).lines
    assert found[3].what.startswith("1x") and tensor[3].what.startswith("4x")


def test_the_largest_models_and_rows_are_found():
    asked = Question("qwen2.5-7b", "4xRTX4090", sequence=1024, batch=16)
    found = largest(asked, None).lines
    assert [line.what.split(":")[0] for line in found] == ["qlora", "lora", "full"] * 2
    assert "llama-3.1-405b" not in [line.what.split(", ")[-1] for line in found[3:]]
    rows = {
        line.what.split(":")[0]: int(re.search(r"(\d+) tokens", line.what).group(1)) for line in found[:3]
    }
    assert all(row % 64 == 0 for row in rows.values())
    for method, row in rows.items():  # 64 tokens more do not fit
        problem = ask(replace(asked, method=method, sequence=row + 64), None)[1]
        assert row == problem.spec.max_positions or first_fit(problem) is None
    assert any(row & (row - 1) for row in rows.values())


@pytest.mark.parametrize(
    ("limit", "first", "most"), [(0, 1, 9), (1, 1, 1), (5, 1, 64), (63, 2, 64), (64, 3, 64)]
)
def test_the_last_that_fits_is_found_by_halving(limit, first, most):
    assert _last(lambda number: number <= limit, first, most) == (limit if limit >= first else 0)


def test_a_method_that_is_asked_for_is_the_only_one():
    found = largest(Question(None, "4xRTX4090", "lora", sequence=1024, batch=16), None)
    assert [line.what.split(":")[0] for line in found.lines] == ["lora"]


def test_larger_models_that_a_pin_forbids_are_said():
    asked = Question(None, "8xH100", "lora", sequence=512, batch=16)
    line = largest(replace(asked, pins=replace(asked.pins, tp=3)), None).lines[0]
    assert (
        line.what.endswith("smollm2-135m") and "larger ones are refused, as tp=3 does not divide" in line.note
    )


def test_text_and_json_say_the_question_first():
    words = ("--hardware", "2xRTX4090", "--method", "lora", "--largest")
    text = run(*words)
    assert re.match(
        r"recipe    lora rank 16, bfloat16, rows up to 2048 tokens .*\nhardware  2 x NVIDIA", text
    )
    assert "note      --seq-len is not said" in text and "note      no offload to disks" in text
    document = json.loads(run(*words, "--json"))
    assert document["sequence"] == 2048 and document["answers"][0]["best"]["plan"]["device"] == "cuda"
    document = json.loads(run("--model", "gpt2", "--what-hardware", "--global-batch", "8", "--json"))
    assert (
        document["model"] == "gpt2"
        and document["hardware"] is None
        and len(document["answers"]) == len(KINDS)
    )
    assert not any("A100" in note for note in document["notes"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--model", "llama-2-7b", "--what-hardware", "--tp", "3"],
            "tp=3 does not divide num_attention_heads=32",
        ),
        (["--model", "llama-2-7b", "--hardware", "8xH100", "--largest", "--tp", "3"], "tp=3 does not divide"),
        (["--model", "llama-2-7b", "--what-hardware", "--hardware", "H100"], "leave one of them out"),
        (["--model", "llama-2-7b", "--what-hardware", "--largest"], "ask one at a time"),
        (["--model", "llama-2-7b", "--what-hardware", "--picture", "x.png"], "--picture=x.png draws"),
        (["--hardware", "H100", "--largest", "--picture", "x.png"], "--picture=x.png draws"),
        (["--hardware", "H100", "--largest", "--image-size", "336x336"], "--image-size"),
        (["--hardware", "H100", "--largest", "--method", "full", "--lora-rank", "8"], "is of no use"),
    ],
)
def test_options_that_do_not_go_together_are_one_sentence(words, sentence):
    with pytest.raises(UserError) as caught:
        run(*words)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
