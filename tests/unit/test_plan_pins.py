"""Pins of `elastane plan`, compiled plans among them: how they are said, kept and shown."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from flows.cli import app
from tasks.commands.plan import plan
from tasks.commands.plan_picture import draw
from tasks.commands.plan_pins import parse_pins
from tasks.commands.plan_question import Question
from tasks.commands.plan_text import lines
from tasks.errors import UserError
from tasks.paths import Paths
from tasks.planner.problem import Pins
from tests.unit.planner_cases import manifest, params
from tests.unit.published_configs import published

ASKED = Question("llama-3.1-8b", "8xA100-80G", "full", sequence=4096, mean_row=1500, batch=64)


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


def test_pins_are_read_by_their_short_names():
    pins = parse_pins(["dp=8", "micro=2", "offload=cpu"])
    assert (pins.data_parallel, pins.micro_batch, pins.offload) == (8, 2, "cpu")
    pins = parse_pins(["sp=false", "compile=true", "schedule=gpipe"])
    assert (pins.sequence_parallel, pins.compiled, pins.schedule) == (False, True, "gpipe")


def test_a_schedule_and_switches_are_pinned_and_named_as_they_were_said():
    words = ("--model", "llama-3.1-8b", "--hardware", "8xA100-80G", "--method", "full", "--pp", "4", "--json")
    document = json.loads(run(*words, "--schedule", "gpipe", "--pin", "compile=true", "--pin", "tp=1"))
    plan = document["chosen"]["plan"]
    assert (plan["pp"], plan["schedule"], plan["compiled"]) == (4, "gpipe", True)
    assert document["trained_by_this_version"] is True
    pinned = ("--dp", "4", "--pp", "2", "--pin", "checkpointing=none", "--pin", "sharding=fsdp2")
    large = (*words[:6], "--seq-len", "4096", "--global-batch", "512", *pinned)
    with pytest.raises(UserError, match=r"; leave out --schedule gpipe, which fits as fsdp4pp2, .* 1f1b"):
        run(*large, "--schedule", "gpipe")
    with pytest.raises(UserError, match="sequence_parallel knows true, false; use one of them"):
        run(*large, "--pin", "sp=yes")


def test_compiled_plans_are_marked_in_text_and_picture():
    answer = plan(replace(ASKED, pins=Pins(compiled=True)), None)
    text = "\n".join(lines(answer))
    assert re.search(r"choice    \S+, micro-batch .*, compiled$", text, re.MULTILINE)
    assert all(
        line.endswith("  compiled") for line in text.splitlines() if re.match(r" {10}\S+ +\d+ +\d+ ", line)
    )
    labels = [label.get_text() for label in draw(answer.report).axes[0].get_yticklabels()]
    assert all("compiled" in label for label in labels)


def test_a_workspace_knows_its_steps_and_so_whether_compiling_pays(tmp_path):
    paths = Paths(tmp_path)
    manifest(rows=2_000_000, mean=100, longest=512).write(paths.manifest)
    paths.base.mkdir(parents=True)
    (paths.base / "config.json").write_text(json.dumps(published("smollm2-135m")))
    long = plan(Question(hardware="8xA100-40G"), (params(), paths))
    assert long.problem.steps == 125_000 and long.report.chosen.plan.compiled
    assert "Compiling takes about 90 s and saves" in long.report.why
    short = plan(
        Question(hardware="8xA100-40G", batch=1024), (params(train={"token_budget": 200_000}), paths)
    )
    assert short.problem.steps == 1 and not short.report.chosen.plan.compiled


def test_pins_may_be_called_as_in_params_yaml() -> None:
    words = ["tensor_parallel_degree=2", "pipeline_parallel_degree=4", "pipeline_schedule=gpipe"]
    assert parse_pins(words) == parse_pins(["tp=2", "pp=4", "schedule=gpipe"])
