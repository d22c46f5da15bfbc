"""`elastane plan`: questions, answers as text, JSON and picture."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from flows.cli import app
from tasks.commands.plan import plan
from tasks.commands.plan_picture import draw, write_picture
from tasks.commands.plan_question import Question
from tasks.commands.plan_text import MARK, lines
from tasks.errors import UserError
from tasks.paths import Paths
from tasks.planner.explain import cost_of
from tasks.planner.problem import Pins
from tasks.planner.words import seconds
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
    # One machine holds it on its disk alone, and a larger one not even there.
    assert plan(asked, None).today.startswith("this version would train it as zero3dp8+nvme")
    today = plan(replace(asked, model="llama-3.1-405b", hardware="8xH100 x 32 nodes IB400"), None).today
    assert today.startswith("of the plans that this version trains (on one machine) none fits")
    assert "none fits: full fine-tuning of this 405.85 B" in today and "no plan fits" not in today


def test_json_is_one_document():
    code, out = run(
        *("--model", "qwen2.5-7b", "--hardware", "4xA100-40G", "--method", "lora", "--seq-len", "1024"),
        *("--global-batch", "32", "--micro-batch", "2", "--json"),
    )
    document = json.loads(out)
    assert code == 0 and document["method"] == "lora" and document["global_batch"] == 32
    assert document["chosen"]["plan"]["micro_batch"] == 2
    assert document["model"] == "qwen2.5-7b" and document["model_spec"]["family"] == "qwen2"
    assert document["chosen"]["estimate"]["tokens_per_second"] > 0
    assert document["hardware"]["gpus"][0]["name"] == "NVIDIA A100-SXM4-40GB"
    assert isinstance(document["trained_by_this_version"], bool)


def test_a_plan_that_is_trained_now_carries_no_mark():
    answer = plan(Question("smollm2-135m", "RTX4090", "lora", sequence=512, batch=16), None)
    assert answer.report.chosen.plan.name == "single" and answer.today == ""
    chosen = next(line for line in lines(answer) if line.startswith("choice"))
    assert MARK not in chosen


def test_qlora_is_trained_now():
    answer = plan(Question("llama-2-13b", "RTX4090", "qlora", sequence=512, batch=16), None)
    assert answer.report.chosen.plan.name == "single" and answer.today == ""


def test_what_is_not_said_is_assumed_aloud():
    notes = " ".join(plan(Question("smollm2-135m", "cpu:8"), None).notes)
    for word in ("--seq-len", "--mean-len", "--global-batch", "host memory assumed"):
        assert word in notes


def test_a_row_that_is_not_said_holds_the_images_and_stays_within_learned_positions():
    answer = plan(Question("llava-v1.6-7b", "2xA100-80G", image_size=(672, 672), batch=16), None)
    assert answer.problem.work.sequence == 2928 + 512
    assert "rows of 3440 tokens are taken: 2928 of images and 512 of text" in " ".join(answer.notes)
    assert plan(Question("gpt2", "RTX4090", batch=16), None).problem.work.sequence == 1024


def test_evaluation_scores_as_many_rows_as_params_yaml_unless_said():
    rows = params().evaluate.batch_size
    assert plan(Question("smollm2-135m", "RTX4090", batch=16), None).problem.evaluation_rows == rows
    one = plan(Question("smollm2-135m", "RTX4090", batch=16, evaluation_rows=1), None)
    assert one.problem.evaluation_rows == 1
    with pytest.raises(UserError, match=r"in evaluation .*; use --eval-rows 1, which fits as"):
        plan(Question("smollm2-135m", "RTX4090", sequence=8192, batch=8, evaluation_rows=64), None)


def test_counts_say_what_is_not_listed():
    asked = replace(ASKED, hardware="8xA100-80G x 8 nodes IB200", batch=512)
    answer = plan(asked, None)
    report, text = answer.report, "\n".join(lines(answer))
    assert report.hopeless > 0 and f"{report.hopeless} layouts were not costed" in text
    kept = 1 + len(report.runners_up)
    assert report.fit > kept and f"{report.fit} plans fit, the best {kept} are in --json" in text
    assert sum(c.estimate is not None for c in report.rejected) == report.unfit
    few = plan(Question("smollm2-135m", "RTX4090", "lora", sequence=128, batch=4), None)
    text = "\n".join(lines(few))
    assert few.report.unfit == 0 and "too much memory" not in text and "too large" not in text
    assert f"{few.report.fit} plans fit, all are in --json" in text


def test_the_next_is_the_first_of_the_runners_up():
    answer = plan(ASKED, None)
    said = re.search(r"Next is (\S+), micro-batch (\d+)", answer.report.why)
    text = lines(answer)
    start = next(index for index, line in enumerate(text) if line.startswith("runners-up"))
    assert "within 2% the simpler plan comes first" in text[start]
    assert text[start + 2].split()[:2] == list(said.groups())


def test_short_times_are_in_short_units():
    assert [seconds(value) for value in (1.234, 0.0744, 9.79e-05, 0.0)] == [
        "1.23 s",
        "74.4 ms",
        "97.9 µs",
        "0 µs",
    ]


def test_the_workspace_is_the_recipe_where_no_model_is_named(tmp_path):
    paths = Paths(tmp_path)
    manifest(mean=100, longest=512).write(paths.manifest)
    paths.base.mkdir(parents=True)
    (paths.base / "config.json").write_text(json.dumps(published("smollm2-135m")))
    answer = plan(Question(hardware="8xA100-40G"), (params(), paths))
    work = answer.problem.work
    assert (work.sequence, work.mean_row, answer.problem.batch) == (512, 100, 16)
    assert answer.name == params().model.name_or_path
    with pytest.raises(UserError, match="--image-size is of no use without --model"):
        plan(Question(hardware="8xA100-40G", image_size=(336, 336)), (params(), paths))
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
        (
            ["--model", "llama-2-7b", "--hardware", "H100", "--images", "2"],
            "--images is of no use: llama-2-7b",
        ),
        (
            ["--model", "llama-2-7b", "--hardware", "H100", "--lora-rank", "4097"],
            "more than hidden_size=4096",
        ),
        (
            ["--model", "llama-2-7b", "--hardware", "H100", "--method", "full", "--lora-rank", "8"],
            "--lora-rank=8 is of no use",
        ),
        (
            ["--model", "gpt2", "--hardware", "H100", "--seq-len", "1025"],
            "more than the model's 1024 learned",
        ),
        (
            [
                "--model",
                "llama-2-7b",
                "--hardware",
                "8xH100",
                "--pin",
                "offload=cpu",
                "--pin",
                "sharding=none",
            ],
            "offload=cpu needs DeepSpeed's zero2 or zero3 and sharding is none",
        ),
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
            "zero3 does not go with tp=2: DeepSpeed takes every rank for a copy",
        ),
        (
            ["--model", "llama-2-7b", "--hardware", "8xH100", "--method", "qlora", "--pin", "sharding=zero3"],
            "zero3 with qlora is not trained: DeepSpeed shares out float weights",
        ),
        (
            ["--model", "llama-2-7b", "--hardware", "8xH100", "--method", "qlora", "--pin", "tp=8"],
            "tp=8 with qlora cuts intermediate_size=11008 into parts of 1376, which would tear apart 64 weights that "
            "share a scale; use tp=1, 2 or 4, or lora",
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
    assert "use --method " in text or "such GPUs, which fits as" in text
    with pytest.raises(UserError, match=r"use --seq-len \d+, which fits as"):
        plan(Question("llama-3.1-8b", "RTX3090", "qlora", sequence=65536, batch=64), None)


def test_the_pin_that_does_not_fit_is_named_and_the_others_kept():
    words = ("--method", "full", "--dp", "8", "--pin", "sharding=none", "--seq-len", "2048")
    with pytest.raises(UserError, match=r"; leave out --sharding none, which fits as fsdp8, micro-batch"):
        run("--model", "llama-3.1-8b", "--hardware", "8xA100-80G", *words)
