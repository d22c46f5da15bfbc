"""`elastane plan`: questions, answers as text, JSON and picture, and its inverse."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from flows.cli import app
from tasks.commands.plan import plan
from tasks.commands.plan_inverse import largest, what_hardware
from tasks.commands.plan_model import model_config
from tasks.commands.plan_picture import draw, write_picture
from tasks.commands.plan_pins import parse_pins
from tasks.commands.plan_question import Question
from tasks.commands.plan_text import MARK, lines
from tasks.errors import UserError
from tasks.paths import Paths
from tasks.planner.explain import cost_of
from tasks.planner.problem import Pins
from tests.unit import hub
from tests.unit.planner_cases import manifest, params
from tests.unit.published_configs import published

ASKED = Question("llama-3.1-8b", "8xA100-80G x 2 nodes IB200", "full", sequence=4096, mean_row=1500, batch=64)


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["plan", *words])
    if isinstance(done.exception, UserError):
        raise done.exception
    return done.exit_code, done.stdout


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """A folder without params.yaml, and no rates of this machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ELASTANE_CACHE", str(tmp_path / "cache"))


def test_text_says_choice_memory_time_rejections_and_advice():
    text = "\n".join(lines(plan(ASKED, None)))
    assert re.search(r"hardware  8 x NVIDIA A100-SXM4-80GB \(79\.2 GiB\) x 2 nodes, 8xIB200", text)
    assert re.search(r"choice    \S+, micro-batch \d+ x accumulation \d+.*" + re.escape(MARK), text)
    for pattern in (
        r"memory    [\d.]+ of 71\.3 GiB a GPU",
        r"optimizer +[\d.]+  █",
        r"compute +[\d.]+ s  █+",
    ):
        assert re.search(pattern, text), pattern
    assert re.search(r"today     this version would train it as \S*fsdp\S+, micro-batch", text)
    assert re.search(
        r"needs [\d.]+ GiB of 71\.3 GiB in training, .*; fits as .*; this plan itself would fit with lora",
        text,
    )
    assert "ruled out" in text and "advice     checkpoints" in text


def test_what_only_several_machines_hold_is_said_not_to_fit_today():
    asked = Question(
        "llama-2-70b", "8xA100-80G x 4 nodes IB200", "full", sequence=512, mean_row=300, batch=64
    )
    assert plan(asked, None).today.startswith(
        "of the plans that this version trains (one process, DDP or FSDP2"
    )


def test_json_is_one_document():
    code, out = run(
        *("--model", "qwen2.5-7b", "--hardware", "4xA100-40G", "--method", "lora", "--seq-len", "1024"),
        *("--global-batch", "32", "--micro-batch", "2", "--json"),
    )
    document = json.loads(out)
    assert code == 0 and document["method"] == "lora" and document["global_batch"] == 32
    assert document["chosen"]["plan"]["micro_batch"] == 2
    assert document["chosen"]["estimate"]["tokens_per_second"] > 0
    assert document["hardware"]["gpus"][0]["name"] == "NVIDIA A100-SXM4-40GB"
    assert isinstance(document["trained_by_this_version"], bool)


def test_a_plan_that_is_trained_now_carries_no_mark():
    answer = plan(Question("smollm2-135m", "RTX4090", "lora", sequence=512, batch=16), None)
    assert answer.report.chosen.plan.name == "single" and answer.today == ""
    chosen = next(line for line in lines(answer) if line.startswith("choice"))
    assert MARK not in chosen


def test_qlora_is_planned_and_said_not_to_be_trained():
    answer = plan(Question("llama-2-13b", "RTX4090", "qlora", sequence=512, batch=16), None)
    assert answer.today == "qlora is planned, not yet trained by this version"


def test_what_is_not_said_is_assumed_aloud():
    notes = " ".join(plan(Question("smollm2-135m", "cpu:8"), None).notes)
    for word in ("--seq-len", "--mean-len", "--global-batch", "host memory assumed"):
        assert word in notes


def test_the_workspace_is_the_recipe_where_no_model_is_named(tmp_path):
    paths = Paths(tmp_path)
    manifest(mean=100, longest=512).write(paths.manifest)
    paths.base.mkdir(parents=True)
    (paths.base / "config.json").write_text(json.dumps(published("smollm2-135m")))
    answer = plan(Question(hardware="8xA100-40G"), (params(), paths))
    work = answer.problem.work
    assert (work.sequence, work.mean_row, answer.problem.batch) == (512, 100, 16)
    assert answer.name == params().model.name_or_path
    changed = plan(Question(hardware="8xA100-40G", method="full", batch=64), (params(), paths))
    assert (changed.problem.work.method, changed.problem.batch) == ("full", 64)


def test_images_become_tokens_and_tiles():
    asked = Question(
        "llava-v1.6-vicuna-7b", "2xA100-80G", "lora", sequence=3072, batch=16, image_size=(672, 672)
    )
    answer = plan(asked, None)
    assert answer.problem.work.tiles == 5
    assert "1 image(s) of 672x672 pixels are 2928 tokens and 5 tiles" in " ".join(answer.notes)
    assert answer.today == "training with images is planned, not yet trained by this version"
    with pytest.raises(UserError, match=r"--seq-len=3072 is less than the 5856 tokens of a row's 2 image"):
        plan(replace(asked, images=2), None)


def test_the_picture_shows_the_best_plans_against_the_limit(tmp_path):
    report = plan(ASKED, None).report
    write_picture(report, tmp_path / "plan.png", "llama")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    left, right = draw(report).axes
    labels = [label.get_text() for label in left.get_yticklabels()]
    assert labels[0].startswith(report.chosen.plan.name) and len(labels) == len(set(labels)) == 6
    reached = max(patch.get_x() + patch.get_width() for patch in right.patches if patch.get_y() < 0.5)
    assert reached == pytest.approx(cost_of(report.chosen).total_seconds)
    limit = cost_of(report.chosen).memory_limit_bytes / 2**30
    assert limit in {line.get_xdata()[0] for line in left.lines}
    with pytest.raises(UserError, match="cannot be written"):
        write_picture(report, tmp_path / "no" / "plan.png")


# --- wrong questions ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--model", "lama-2-7b", "--hardware", "H100"], "near it: llama-2-7b"),
        (["--model", "llama-2-7b", "--hardware", "8xZ80"], "is no GPU kind"),
        (["--hardware", "H100"], "give --model"),
        (["--model", "llama-2-7b", "--hardware", "H100", "--pin", "tea=2"], "write key=value"),
        (
            ["--model", "llama-2-7b", "--hardware", "H100", "--pin", "sharding=zero9"],
            "sharding knows none, fsdp2",
        ),
        (["--model", "llama-2-7b", "--hardware", "H100", "--image-size", "big"], "WIDTHxHEIGHT"),
        (["--model", "llama-2-7b", "--hardware", "H100", "--image-size", "8x8"], "has no vision tower"),
        (["--model", "llama-2-7b", "--hardware", "H100", "--seq-len", "64", "--mean-len", "65"], "lower it"),
        (
            ["--model", "llama-2-7b", "--hardware", "8xH100", "--tp", "3"],
            "tp=3 does not divide num_attention_heads=32",
        ),
        (
            ["--model", "llama-2-7b", "--hardware", "8xH100", "--pp", "33"],
            "pp=33 is more than the model's 32 layers",
        ),
        (
            ["--model", "llama-2-7b", "--hardware", "8xH100", "--dp", "3"],
            "=3 does not divide train.global_batch=64",
        ),
        (
            ["--model", "llama-2-7b", "--hardware", "8xH100", "--pp", "2", "--pin", "sharding=zero2"],
            "zero2 does not go with pp=2",
        ),
        (
            ["--model", "llama-2-7b", "--hardware", "8xH100", "--tp", "2", "--pin", "sharding=zero3"],
            "zero3 with tp=2 is not supported",
        ),
        (
            ["--model", "llama-2-7b", "--hardware", "8xH100", "--method", "qlora", "--pin", "sharding=zero3"],
            "zero3 with qlora",
        ),
    ],
)
def test_a_wrong_question_is_one_sentence_with_the_way_out(words, sentence):
    with pytest.raises(UserError) as caught:
        run(*words)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_when_nothing_fits_the_neighbours_that_would_are_named():
    with pytest.raises(UserError) as caught:
        plan(
            Question("llama-3.1-8b", "RTX3090", "full", sequence=4096, batch=64, pins=Pins(offload="none")),
            None,
        )
    text = str(caught.value)
    need, limit = map(float, re.search(r"needs ([\d.]+) GiB of ([\d.]+) GiB", text).groups())
    assert limit == pytest.approx(23.6 * 0.9, abs=0.1) and need > limit
    assert "use train.finetuning_type=" in text or "such GPUs, which fits as" in text
    with pytest.raises(UserError, match=r"set prepare_data\.max_length=\d+, which fits as"):
        plan(Question("llama-3.1-8b", "RTX3090", "qlora", sequence=65536, batch=64), None)


def test_pins_are_read_by_their_short_names():
    pins = parse_pins(["dp=8", "micro=2", "offload=cpu"])
    assert (pins.data_parallel, pins.micro_batch, pins.offload) == (8, 2, "cpu")


# --- models -------------------------------------------------------------------------------------


def test_a_folder_and_a_file_are_models_too(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(published("qwen3-4b")))
    assert model_config(str(tmp_path)) == model_config(str(tmp_path / "config.json")) == published("qwen3-4b")
    with pytest.raises(UserError, match=r"config\.json is missing"):
        (tmp_path / "config.json").unlink()
        model_config(str(tmp_path))


def test_a_hub_that_does_not_answer_is_a_sentence_at_once(monkeypatch):
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{filename}"
    )
    start = time.monotonic()
    with pytest.raises(UserError, match=r"out of reach .* give a local config"):
        model_config("owner/model")
    assert time.monotonic() - start < 10


def test_a_config_is_fetched_from_the_hub(tmp_path, monkeypatch):
    with hub.serve() as served:
        (tmp_path / "config.json").write_text(json.dumps(published("qwen3-4b")))
        commit = served.push(tmp_path)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            f"{served.url}/{{repo_id}}/resolve/{commit}/{{filename}}",
        )
        assert model_config(hub.REPOSITORY) == published("qwen3-4b")


# --- the other way round ------------------------------------------------------------------------


def test_the_smallest_machines_are_found():
    found = what_hardware(Question("llama-2-7b", method="lora", sequence=1024, batch=16), None)
    assert len(found) == 7 and all(line.best is not None for line in found)
    smallest = {line.what for line in found}
    assert "1xA100-80G" in smallest
    full = what_hardware(Question("llama-3.1-70b", method="full", sequence=1024, batch=64), None)
    sizes = {line.what.split(" ")[0][0] for line in full if line.best is not None}
    assert sizes and "1" not in sizes
    assert all(re.search(r"tokens/s|nothing fits", line.text()) for line in full)


def test_the_largest_models_and_rows_are_found():
    found = largest(Question("qwen2.5-7b", "4xRTX4090", sequence=1024, batch=16), None)
    assert [line.what.split(":")[0] for line in found] == ["qlora", "lora", "full"] * 2
    longest = [int(re.search(r"(\d+) tokens", line.what).group(1)) for line in found[:3] if line.best]
    assert len(longest) == 3 and min(longest) >= 512
    models = [line.what.split(", ")[-1] for line in found[3:]]
    assert "llama-3.1-405b" not in models
