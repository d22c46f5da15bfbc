"""A scheduler's pre-emption: the train stage hands the signal on, the workers save, and it says so by its code."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.pipeline.kill import steps_logged, wait_until
from tests.pipeline.workspace import make_workspace


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGUSR1])
def test_a_preempted_stage_saves_and_ends_with_75(tmp_path: Path, number: signal.Signals) -> None:
    workspace = make_workspace(
        tmp_path / "w", **{"train.num_train_epochs": 300, "train.checkpoint_every_seconds": 600}
    )
    for stage in ("prepare_data", "probe_hardware", "select_strategy"):
        workspace.must("python", "-m", f"tasks.{stage}")
    with (tmp_path / "log").open("w") as log:
        stage = subprocess.Popen(
            ["python", "-m", "tasks.train"], cwd=workspace.root, env=workspace.environment, stderr=log
        )
        wait_until(lambda: steps_logged(workspace) > 3 or stage.poll() is not None, 120)
        stage.send_signal(number)
        assert stage.wait(60) == 75, (tmp_path / "log").read_text()
    saved = [path.name for path in workspace.root.glob("runs/*/checkpoints/*")]
    assert saved == [f"step-{steps_logged(workspace):08d}"]
