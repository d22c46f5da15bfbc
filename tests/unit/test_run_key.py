"""A RunKey changes with the recipe, the data and the base, and with nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.contracts import BaseModelRef, DataManifest, SplitCounts
from tasks.run_key import recipe, run_key
from tests import tiny

COUNTS = SplitCounts(rows=1, tokens=1, target_tokens=1, longest=1)
MANIFEST = DataManifest(
    source="x",
    source_fingerprint="f",
    format="alpaca",
    content_hash="data",
    max_length=8,
    rows_in=2,
    train=COUNTS,
    validation=COUNTS,
    truncated=0,
    length_histogram=(),
    rejected={},
)
BASE = BaseModelRef(
    name_or_path="m",
    revision=None,
    kind="folder",
    weights="source",
    content_hash="base",
    source_hash="base",
    trust_remote_code=False,
)


def key(**changes: Any) -> str:
    return run_key(tiny.params(**changes), MANIFEST, BASE)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 1),
        ("train.learning_rate", 0.5),
        ("train.global_batch", 8),
        ("train.finetuning_type", "full"),
        ("train.precision", "float32"),
        ("train.token_budget", 10),
        ("train.max_grad_norm", 0.1),
    ],
)
def test_what_is_learned_changes_the_key(name: str, value: Any) -> None:
    assert key(**{name: value}) != key()


def test_a_lora_key_changes_it() -> None:
    assert key(**{"train.lora.rank": 2}) != key()
    full = {"train.finetuning_type": "full"}
    assert key(**full, **{"train.lora.rank": 2}) == key(**full), "full tuning has no rank"
    assert key(**{"train.lora.train_embeddings": True}) != key()
    assert recipe(tiny.params())["lora"] == {"rank": 16, "alpha": 32.0, "targets": "all-linear"}, (
        "what was trained before there was a key keeps its own"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("select_strategy.data_parallel_degree", 2),
        ("select_strategy.per_device_train_batch_size", 4),
        ("select_strategy.activation_checkpointing", "full"),
        ("train.checkpoint_every_seconds", 1.0),
        ("train.keep_checkpoints", 5),
        ("evaluate.max_rows", 3),
        ("register.model_name", "other"),
    ],
)
def test_what_only_changes_speed_or_review_keeps_the_key(name: str, value: Any) -> None:
    assert key(**{name: value}) == key()


def test_the_global_batch_may_be_said_as_three_factors() -> None:
    factors = {
        "train.global_batch": "auto",
        "select_strategy.per_device_train_batch_size": 4,
        "select_strategy.gradient_accumulation_steps": 2,
        "select_strategy.data_parallel_degree": 2,
    }
    assert key(**factors) == key()


def test_data_and_base_change_the_key() -> None:
    params = tiny.params()
    assert run_key(params, MANIFEST.model_copy(update={"content_hash": "x"}), BASE) != key()
    assert run_key(params, MANIFEST, BASE.model_copy(update={"content_hash": "x"})) != key()
