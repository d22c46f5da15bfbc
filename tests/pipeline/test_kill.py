"""kill -9 in the midst of training, with real processes; `python -m benchmarks.kill9` does many more."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.pipeline.kill import VICTIMS, kill_once
from tests.pipeline.workspace import Workspace

pytestmark = [pytest.mark.timeout(500), pytest.mark.distributed]


def test_after_kill_9_the_weights_equal_an_uninterrupted_runs(finished: Workspace, tmp_path: Path) -> None:
    """Two ranks; the train stage is killed, dvc repro goes on from its checkpoint."""
    workspace = finished.copy(tmp_path / "w")
    workspace.change(**{"select_strategy.data_parallel_degree": 2, "train.num_train_epochs": 12})
    workspace.must("dvc", "repro", "-q", "train")  # what it is compared with needs no evaluation
    kill = kill_once(workspace, "train stage", 2, random.Random(2), workspace.weights())
    assert 0 < kill.drawn_step <= kill.step_at_death < kill.steps, "in the midst of training"
    assert kill.left_behind == 0
    assert kill.equal


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("victim", list(VICTIMS))
def test_any_victim_at_any_moment(finished: Workspace, tmp_path: Path, victim: str, ranks: int) -> None:
    workspace = finished.copy(tmp_path / "w")
    workspace.change(**{"select_strategy.data_parallel_degree": ranks, "train.num_train_epochs": 12})
    workspace.must("dvc", "repro", "-q")
    kill = kill_once(workspace, victim, ranks, random.Random(f"{victim}{ranks}"), workspace.weights())
    assert kill.left_behind == 0
    assert kill.equal
