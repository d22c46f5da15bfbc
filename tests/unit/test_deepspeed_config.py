"""A ds_config.json against the recipe: pins, conflicts with both values and who wins, what passes through."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.contracts import Candidate, PlanReport, Resolved
from tasks.deepspeed_file import file_changed, file_hash, read_wishes, with_passed_on, with_wishes
from tasks.errors import UserError
from tasks.optimizers import Optim
from tasks.params import Params
from tasks.paths import Paths
from tasks.planner.deepspeed_config import RecipeFacts, deepspeed_wishes, names_of, with_passed
from tasks.planner.problem import Pins
from tasks.trainer.zero_config import zero_config
from tests import tiny
from tests.unit.planner_cases import TINY

RECIPE = RecipeFacts(32, "adamw_torch", 5e-5, (0.9, 0.999), 1e-8, 0.0, 1.0, "linear", "float16")
# The first seed's.
SEED: dict[str, Any] = {
    "train_batch_size": 32,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 5e-5}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "fp16": {"enabled": True},
}


def test_the_first_seeds_config_pins_its_plan_and_contradicts_nothing() -> None:
    found = deepspeed_wishes(SEED, RECIPE)
    assert found.pins == {
        "engine": "deepspeed",
        "sharding": "zero3",
        "offload": "cpu",
        "offload_parameters": "none",
        "accumulation": 2,
    }
    assert found.conflicts == ()
    assert list(names_of(found.passed)) == ["zero_optimization.offload_optimizer.pin_memory"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"train_batch_size": 64}, "train_batch_size=64 of the ds_config is not train.global_batch=32"),
        (
            {"optimizer": {"type": "Lion"}},
            "optimizer.type=Lion of the ds_config is not train.optim=adamw_torch",
        ),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "optimizer.type=Adam"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}},
            "optimizer.params.lr=0.0001 of the ds_config is not train.learning_rate=5e-05",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95]}}},
            "adam_beta1, adam_beta2=[0.9, 0.999]",
        ),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler.type=WarmupLR of the ds_config is not train.lr_sch"),
        ({"gradient_clipping": 0.3}, "gradient_clipping=0.3 of the ds_config is not train.max_grad_norm=1.0"),
        (
            {"fp16": {"enabled": False}, "bf16": {"enabled": True}},
            "bf16.enabled=true of the ds_config is not train.p",
        ),
    ],
)
def test_a_conflict_is_named_with_both_values_and_the_recipe_wins(
    changes: dict[str, Any], sentence: str
) -> None:
    (conflict,) = deepspeed_wishes(SEED | changes, RECIPE).conflicts
    assert sentence in conflict and conflict.endswith("of params.yaml; params.yaml wins")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"train_batch_size": 31},
            "train_batch_size=31 of the ds_config is no multiple of its gradient_accumul",
        ),
        ({"train_batch_size": 30, "gradient_accumulation_steps": 5}, "does not divide train.global_batch=32"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage=4"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "tape"}}},
            "offload_param.device='tape'",
        ),
        ({"zero_optimization": [3]}, "reads a section of keys there"),
        ({"gradient_accumulation_steps": 0}, "no whole number of 1 or more"),
        ({"gradient_accumulation_steps": True}, "no whole number of 1 or more"),
        ({"bf16": {"enabled": True}}, "enables fp16 and bf16 at once"),
        ({"gradient_clipping": "much"}, "gradient_clipping='much' of the ds_config is no number"),
    ],
)
def test_what_contradicts_itself_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        deepspeed_wishes(SEED | changes, RECIPE)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("optim", "kind", "same"),
    [
        ("lion", "Lion", True),
        ("lion", "AdamW", False),
        ("adamw_8bit", "AdamW", False),
        ("adafactor", "Adafactor", True),
        ("adafactor", None, True),
        ("lion", "auto", True),
    ],
)
def test_the_optimizer_is_that_of_the_recipe(optim: Optim, kind: str | None, same: bool) -> None:
    config = {"optimizer": {"type": kind}} if kind else {}
    conflicts = deepspeed_wishes(config, replace(RECIPE, optim=optim)).conflicts
    assert (
        conflicts == ()
        if same
        else f"optimizer.type={kind} of the ds_config is not train.optim" in conflicts[0]
    )


def test_auto_says_nothing_and_unknown_keys_pass_through() -> None:
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto"}},
        "fp16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2, "overlap_comm": False, "reduce_bucket_size": "auto"},
        "aio": {"thread_count": 2},
        "invented_key": 7,
    }
    found = deepspeed_wishes(config, replace(RECIPE, precision="bfloat16"))
    assert found.conflicts == ()
    assert found.pins == {
        "engine": "deepspeed",
        "sharding": "zero2",
        "offload": "none",
        "offload_parameters": "none",
    }
    assert sorted(names_of(found.passed)) == [
        "aio.thread_count",
        "invented_key",
        "zero_optimization.overlap_comm",
    ]
    ours = {"gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "overlap_comm": True}}
    assert with_passed(ours, found.passed) == {
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "overlap_comm": False},
        "aio": {"thread_count": 2},
        "invented_key": 7,
    }


def test_what_is_neither_compared_nor_passed_on_is_named() -> None:
    config = SEED | {
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-5, "torch_adam": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10}},
        "amp": {"opt_level": "O1"},
    }
    found = deepspeed_wishes(config, RECIPE)
    assert sorted(found.unused) == [
        "amp.opt_level",
        "fp16.initial_scale_power",
        "fp16.loss_scale",
        "optimizer.params.torch_adam",
        "scheduler.params",
    ]
    assert found.conflicts == () and "amp" not in found.passed
    assert deepspeed_wishes(SEED, RECIPE).unused == ()


def test_the_folder_on_nvme_is_read() -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/fast/disk"}}
    found = deepspeed_wishes({"zero_optimization": zero}, RECIPE)
    assert found.passed == {"zero_optimization": {"offload_optimizer": {"nvme_path": "/fast/disk"}}}
    assert found.pins["offload"] == "nvme"


# --- in a workspace -------------------------------------------------------------------------------


def in_a_workspace(root: Path, config: dict[str, Any], **changes: object) -> tuple[Params, Paths]:
    (root / "ds_config.json").write_text(json.dumps(config), encoding="utf-8")
    params = tiny.params(
        **{
            "select_strategy.deepspeed_config": "ds_config.json",
            "train.global_batch": 32,
            "train.learning_rate": 5e-5,
            **changes,
        }
    )
    return params, Paths(root)


def test_the_file_is_said_and_becomes_pins_and_passed_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = SEED | {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "flops_profiler": {"enabled": True},
    }
    params, paths = in_a_workspace(tmp_path, config)
    wishes = read_wishes(params, paths, "float16")
    assert wishes is not None
    said = capsys.readouterr().err
    assert "optimizer.params.lr=0.0001 of the ds_config is not train.learning_rate=5e-05" in said
    assert "flops_profiler.enabled, zero_optimization.offload_optimizer.pin_memory" in said
    pins = with_wishes(Pins(), wishes)
    assert (pins.sharding, pins.offload, pins.accumulation) == ("zero3", "cpu", 2)
    plan = tiny.cpu_plan().model_copy(
        update={"engine": "deepspeed", "sharding": "zero3", "offload": "cpu", "dp_replicate": 1}
    )
    config = zero_config(with_passed_on(plan, wishes), params.train)
    assert config["flops_profiler"] == {"enabled": True}
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert config["zero_optimization"]["stage"] == 3


def test_two_pins_that_differ_are_refused(tmp_path: Path) -> None:
    params, paths = in_a_workspace(tmp_path, SEED)
    wishes = read_wishes(params, paths, "float16")
    assert wishes is not None
    with pytest.raises(
        UserError, match=r"pins sharding=zero2, and select_strategy\.deepspeed_config says zero3"
    ):
        with_wishes(Pins(sharding="zero2"), wishes)


@pytest.mark.parametrize(
    ("text", "sentence"), [(None, "cannot be read"), ("{", "is not JSON"), ("[1]", "holds list")]
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str | None, sentence: str) -> None:
    params, paths = in_a_workspace(tmp_path, SEED)
    path = tmp_path / "ds_config.json"
    path.unlink() if text is None else path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=sentence):
        read_wishes(params, paths, "float32")


def test_another_file_than_the_plan_was_made_with_is_seen(tmp_path: Path) -> None:
    params, paths = in_a_workspace(tmp_path, SEED)
    assert not file_changed(params, paths)  # no plan yet
    PlanReport(
        chosen=Candidate(plan=tiny.cpu_plan(), estimate=None, rejected=None),
        why="",
        runners_up=(),
        rejected=(),
        resolved=Resolved(precision="float32", token_budget=None),
        model=TINY,
        deepspeed_config=file_hash(params, paths),
    ).write(paths.plan)
    assert not file_changed(params, paths)
    in_a_workspace(tmp_path, SEED | {"train_batch_size": 64})
    assert file_changed(params, paths)
    (tmp_path / "ds_config.json").unlink()
    assert file_changed(params, paths)
