"""Workspaces and single-process trainings that all comparisons share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiny
from tests.distributed.compare import keep, workspace
from tests.distributed.ranks import Trained, train


@pytest.fixture(scope="session")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return workspace(tmp_path_factory.mktemp("lora") / "w")


@pytest.fixture(scope="session")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return workspace(
        tmp_path_factory.mktemp("full") / "w",
        **{"train.finetuning_type": "full", "train.learning_rate": 0.003},
    )


@pytest.fixture(scope="session")
def lora_single(lora: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return keep(train(lora, tiny.params(), tiny.cpu_plan(1, 2, 4)), tmp_path_factory)


@pytest.fixture(scope="session")
def full_single(full: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return keep(train(full, tiny.params(), tiny.cpu_plan(1, 2, 4)), tmp_path_factory)
