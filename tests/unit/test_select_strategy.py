"""The stage select_strategy over files in a workspace."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tasks.contracts import PlanReport, StageStatus
from tasks.data.order import SampleOrder
from tasks.errors import UserError
from tasks.paths import Paths
from tasks.select_strategy import precision_note, resolve, run_steps, select_strategy
from tests.unit.planner_cases import cpu, gpus, manifest, params, train_params

REPOSITORY = Path(__file__).parents[2]
CONFIG = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
VOLTA = gpus(2, "Tesla V100-SXM2-32GB", 32, (7, 0))


@pytest.fixture
def paths(tmp_path):
    paths = Paths(tmp_path)
    cpu(2).write(paths.hardware)
    manifest().write(paths.manifest)
    paths.base.mkdir(parents=True)
    (paths.base / "config.json").write_text(json.dumps(CONFIG))
    return paths


def test_writes_the_plan_and_explains_it(paths, capsys):
    report = select_strategy(params(), paths)
    assert PlanReport.read(paths.plan) == report
    assert report.chosen.plan.name == "single"
    assert report.resolved.precision == "float32"
    assert report.resolved.token_budget == params().train.token_budget_on_cpu
    assert report.model.parameters == 134_515_008
    out, err = capsys.readouterr()
    assert out == ""
    assert report.why in err
    for word in (
        "Memory, GiB: weights",
        "logits",
        "Step: compute",
        "chosen",
        "checkpointing",
        "134.5 M parameters",
    ):
        assert word in err


def test_the_table_lists_rejections_with_their_sentence(paths, capsys):
    gpus(1, gib=4).write(paths.hardware)
    manifest(longest=2048).write(paths.manifest)
    report = select_strategy(params(evaluate={"batch_size": 1}), paths)
    assert report.rejected
    assert report.rejected[0].rejected in capsys.readouterr().err


def test_the_same_inputs_write_the_same_bytes(paths):
    select_strategy(params(), paths)
    first = paths.plan.read_bytes()
    select_strategy(params(), paths)
    assert paths.plan.read_bytes() == first


@pytest.mark.parametrize(
    ("machine", "precision", "budget"),
    [(cpu(2), "float32", 35000), (gpus(2), "bfloat16", None), (VOLTA, "float16", None)],
)
def test_auto_becomes_what_the_device_is_good_at(machine, precision, budget):
    resolved = resolve(train_params(), machine)
    assert (resolved.precision, resolved.token_budget) == (precision, budget)
    assert precision_note(resolved.precision, machine) is None


def test_one_old_gpu_among_new_ones_decides():
    mixed = gpus(2).model_copy(update={"gpus": (gpus(1).gpus[0], VOLTA.gpus[0])})
    assert resolve(train_params(), mixed).precision == "float16"


def test_what_is_said_is_obeyed(paths, capsys):
    report = select_strategy(params(train={"precision": "bfloat16", "token_budget": 700}), paths)
    assert (report.resolved.precision, report.resolved.token_budget) == ("bfloat16", 700)
    assert "about 30 times slower" in capsys.readouterr().err
    assert "below 8.0" in precision_note("bfloat16", VOLTA)
    assert resolve(train_params(token_budget=None), cpu(2)).token_budget is None


@pytest.mark.parametrize(
    ("pin", "sentence"),
    [
        (
            {"tensor_parallel_degree": 3},
            "degree=3 cannot be trained: a model that runs code of its own .* whole or sharded; use 1 or auto",
        ),
    ],
)
def test_what_is_planned_but_not_trained_is_refused_in_a_run(paths, pin, sentence):
    (paths.base / "config.json").write_text(json.dumps(CONFIG | {"auto_map": {"AutoConfig": "x.Y"}}))
    with pytest.raises(UserError, match=sentence):
        select_strategy(params(select_strategy=pin, model={"trust_remote_code": True}), paths)


@pytest.mark.parametrize(
    "pin", [{"engine": "deepspeed"}, {"sharding": "zero2"}, {"offload": "cpu"}, {"offload_parameters": "cpu"}]
)
def test_without_deepspeed_its_plans_are_left_out_and_pins_say_how_to_get_it(paths, monkeypatch, pin):
    gpus(2).write(paths.hardware)
    monkeypatch.setattr("tasks.select_strategy.find_spec", lambda name: name)
    engines = {c.plan.engine for c in select_strategy(params(), paths).runners_up}
    monkeypatch.setattr("tasks.select_strategy.find_spec", lambda name: None)
    left = {c.plan.engine for c in select_strategy(params(), paths).runners_up}
    assert (engines, left) == ({"torch", "deepspeed"}, {"torch"})
    ((key, value),) = pin.items()
    with pytest.raises(UserError, match=f"{key}={value} needs DeepSpeed, .*; pip install deepspeed, or"):
        select_strategy(params(select_strategy=pin), paths)


def test_nvme_needs_what_its_op_is_compiled_with(paths, monkeypatch):
    monkeypatch.setattr("tasks.select_strategy.find_spec", lambda name: name)
    monkeypatch.setattr("tasks.select_strategy.can_build_async_io", lambda: False)
    with pytest.raises(UserError, match=r"offload=nvme needs DeepSpeed's async_io, .*libaio-dev, or use cpu"):
        select_strategy(params(select_strategy={"offload": "nvme"}), paths)
    monkeypatch.setattr("tasks.select_strategy.can_build_async_io", lambda: True)
    report = select_strategy(params(select_strategy={"offload": "nvme"}), paths)
    assert report.chosen.plan.name == "zero3dp1+nvme"


def test_layers_are_cut_where_the_models_own_code_is_not_run(paths):
    (paths.base / "config.json").write_text(json.dumps(CONFIG | {"auto_map": {"AutoConfig": "x.Y"}}))
    report = select_strategy(params(select_strategy={"tensor_parallel_degree": 3}), paths)
    assert report.chosen.plan.name == "tp3sp"


def test_degrees_and_schedule_of_params_yaml_are_the_plans(paths):
    pins = {
        "tensor_parallel_degree": 3,
        "pipeline_parallel_degree": 2,
        "data_parallel_degree": 2,
        "pipeline_schedule": "gpipe",
        "sequence_parallel": False,
        "activation_checkpointing": "selective",
    }
    cpu(2, gib=64).write(paths.hardware)
    plan = select_strategy(params(select_strategy=pins), paths).chosen.plan
    assert (plan.name, plan.world_size) == ("dp2tp3pp2-gpipe", 12)
    assert plan.activation_checkpointing == "selective"


@pytest.mark.parametrize("budget", [None, 900, 20_000])
@pytest.mark.parametrize("epochs", [0.3, 1, 2.5])
def test_the_steps_a_plan_is_made_for_are_those_that_are_trained(budget, epochs):
    lengths = np.full(1003, 37)
    train = train_params(num_train_epochs=epochs, token_budget=budget)
    rows = manifest(rows=len(lengths), mean=37)
    trained = SampleOrder(len(lengths), 16, seed=1).steps(epochs, lengths, budget)
    assert run_steps(train, rows, 16, gpus(1)) == pytest.approx(trained, abs=1)


def test_a_plan_is_compiled_if_the_recipe_is_long_enough(paths):
    gpus(1, gib=80).write(paths.hardware)
    manifest(rows=100_000).write(paths.manifest)
    assert select_strategy(params(), paths).chosen.plan.compiled
    short = {"token_budget": 20_000}
    assert not select_strategy(params(train=short), paths).chosen.plan.compiled


def test_a_communication_hook_of_the_recipe_leaves_ddp(paths):
    gpus(4, gib=80).write(paths.hardware)
    report = select_strategy(params(train={"communication_hook": "fp16"}), paths)
    plans = [candidate.plan for candidate in (report.chosen, *report.runners_up)]
    assert {plan.name for plan in plans} <= {"single", "ddp2", "ddp4"}


def test_an_evaluation_that_does_not_fit_names_its_batch(paths):
    gpus(1, gib=4).write(paths.hardware)
    manifest(longest=2048).write(paths.manifest)
    with pytest.raises(
        UserError, match=r"GPU in evaluation .*; set evaluate\.batch_size=1, which fits as single"
    ):
        select_strategy(params(), paths)


@pytest.mark.parametrize("missing", ["hardware", "manifest"])
def test_a_missing_input_is_named(paths, missing):
    getattr(paths, missing).unlink()
    with pytest.raises(UserError, match=f"{missing}.json is missing"):
        select_strategy(params(), paths)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "is missing"),
        ("{", "is not JSON"),
        ("[]", "holds list"),
        ('{"model_type": "bert"}', "model_type='bert'"),
    ],
)
def test_a_config_that_cannot_be_read_ends_before_anything_is_written(paths, text, sentence):
    config = paths.base / "config.json"
    config.unlink() if text is None else config.write_text(text)
    with pytest.raises(UserError, match=sentence):
        select_strategy(params(), paths)
    assert not paths.plan.exists()


def test_as_a_stage_it_exits_with_2_after_a_users_mistake(paths):
    text = (REPOSITORY / "params.yaml").read_text()
    (paths.root / "params.yaml").write_text(
        text.replace("tensor_parallel_degree: auto ", "tensor_parallel_degree: 2 ")
    )
    command = [sys.executable, "-m", "tasks.select_strategy"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run(
        command, cwd=paths.root, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert "tp=2 does not divide num_attention_heads=9; use tp=1 or 3" in run.stderr
    assert "Traceback" not in run.stderr
    assert StageStatus.read(paths.status("select_strategy")).exit_code == 2
    shutil.copy(REPOSITORY / "params.yaml", paths.root)
    run = subprocess.run(
        command, cwd=paths.root, env=environment, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (0, "")
    assert paths.plan.is_file()
