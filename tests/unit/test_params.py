"""Every wrong params.yaml ends in one sentence with the value, the rule and the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.errors import UserError
from tasks.params import MIGRATIONS, SECTIONS, Params, parse_params, read_params
from tasks.run_key import recipe
from tests import tiny


def refused(raw: dict[str, Any]) -> str:
    with pytest.raises(UserError) as error:
        parse_params(raw, "params.yaml")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_shipped_file_is_valid() -> None:
    params = read_params(tiny.REPOSITORY / "params.yaml")
    assert params.global_batch == 16
    assert set(SECTIONS) <= {field.alias or name for name, field in Params.model_fields.items()}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("train.learning_rate", -1, ["train.learning_rate=-1", "greater than 0"]),
        ("train.learning_rate", "fast", ["train.learning_rate='fast'", "number"]),
        ("train.global_batch", 0, ["train.global_batch=0"]),
        ("select_strategy.compile", "yes", ["select_strategy.compile='yes'", "'auto', True or False"]),
        ("select_strategy.sequence_parallel", None, ["sequence_parallel=None", "'auto', True or False"]),
        ("select_strategy.pipeline_schedule", "1F1B", ["pipeline_schedule='1F1B'", "'1f1b'"]),
        ("select_strategy.communication_hook", "fp16", ["train.communication_hook"]),
        ("train.communication_hook", None, ["train.communication_hook=None", "'none', 'fp16', 'bf16'"]),
        ("train.finetuning_type", "dora", ["'dora'", "'lora', 'qlora' or 'full'"]),
        ("prepare_data.validation_fraction", 1.0, ["validation_fraction=1.0", "less than 1"]),
        ("select_strategy.data_parallel_degree", 3, ["data_parallel_degree=3", "global_batch=16"]),
        ("train.learnin_rate", 1, ["unknown key train.learnin_rate=1", "did you mean learning_rate"]),
        ("per_device_train_batch_size", 4, ["select_strategy.per_device_train_batch_size"]),
        ("model.model_name_or_path", "x", ["model.name_or_path"]),
        ("train.lora.lora_dropout", 0.1, ["dropout is 0"]),
    ],
)
def test_a_wrong_value_names_itself_and_the_way_out(name: str, value: Any, words: list[str]) -> None:
    sentence = refused(tiny.raw_params(**{name: value}))
    assert all(word in sentence for word in words), sentence


@pytest.mark.parametrize(
    "key",
    [
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "learning_rate",
        "num_train_epochs",
        "data_parallel_degree",
        "tensor_parallel_degree",
        "pipeline_parallel_degree",
        "finetuning_type",
        "optim",
        "ddp_backend",
        "model_name_or_path",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "pipeline_parallel_schedule",
        "sequence_parallel",
        "torch_compile",
        "ddp_comm_hook",
    ],
)
def test_the_names_people_bring_lead_to_a_key_that_exists(key: str) -> None:
    assert MIGRATIONS[key] in refused(tiny.raw_params(**{key: 1}))
    place: Any = tiny.raw_params()
    for part in MIGRATIONS[key].split("."):
        place = place[part]


@pytest.mark.parametrize("value", ["auto", True, False])
def test_a_switch_is_auto_or_a_truth_value(value: Any) -> None:
    params = tiny.params(**{"select_strategy.compile": value, "select_strategy.sequence_parallel": value})
    assert params.select_strategy.compile is value and params.select_strategy.sequence_parallel is value


def test_a_communication_hook_belongs_to_what_is_learned_and_a_schedule_does_not() -> None:
    plain = recipe(tiny.params())
    assert recipe(tiny.params(**{"train.communication_hook": "fp16"})) != plain
    pinned = {
        "select_strategy.pipeline_schedule": "gpipe",
        "select_strategy.sequence_parallel": True,
        "select_strategy.compile": True,
    }
    assert recipe(tiny.params(**pinned)) == plain


def test_batch_and_accumulation_without_a_degree_name_the_global_batch() -> None:
    sentence = refused(
        tiny.raw_params(
            **{
                "train.global_batch": "auto",
                "select_strategy.per_device_train_batch_size": 4,
                "select_strategy.gradient_accumulation_steps": 2,
            }
        )
    )
    assert "train.global_batch" in sentence
    assert "data_parallel_degree is auto" in sentence


def test_three_explicit_factors_make_the_global_batch() -> None:
    params = tiny.params(
        **{
            "train.global_batch": "auto",
            "select_strategy.per_device_train_batch_size": 4,
            "select_strategy.gradient_accumulation_steps": 2,
            "select_strategy.data_parallel_degree": 3,
        }
    )
    assert params.global_batch == 24


def test_a_missing_key_is_an_error() -> None:
    raw = tiny.raw_params()
    del raw["train"]["optim"]
    assert "train.optim is missing" in refused(raw)


def test_scientific_notation_is_a_number_as_in_dvc(tmp_path: Path) -> None:
    text = (
        (tiny.REPOSITORY / "params.yaml").read_text().replace("learning_rate: 1.0e-3", "learning_rate: 1e-5")
    )
    (tmp_path / "params.yaml").write_text(text)
    assert read_params(tmp_path / "params.yaml").train.learning_rate == 1e-5


@pytest.mark.parametrize("text", ["a: [1", "- 1\n- 2\n", "", "seed: 1\nseed: 2\n"])
def test_a_file_that_is_no_mapping_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "params.yaml").write_text(text)
    with pytest.raises(UserError, match=r"params\.yaml"):
        read_params(tmp_path / "params.yaml")
