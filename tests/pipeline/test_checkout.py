"""To an older revision and back in the midst of a run: `dvc checkout` takes outputs, never resumable state."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from ruamel.yaml import YAML

from tasks.contracts import FinalManifest, TrainPerformance, TrainReport
from tasks.paths import Paths
from tests import tiny
from tests.pipeline.kill import forget_training, processes, wait_until
from tests.pipeline.workspace import Workspace

pytestmark = pytest.mark.timeout(500)

IDENTITY = ("-c", "user.name=t", "-c", "user.email=t@t")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def newest_checkpoint(run: Path | None) -> int:
    """The step of the newest checkpoint, by the name that a checkpoint gets once it is complete; 0 without any."""
    folders = run.glob("checkpoints/step-*") if run else ()
    return max((int(folder.name.removeprefix("step-")) for folder in folders), default=0)


def half_trained(workspace: Workspace, least: int) -> Path:
    """Starts the pipeline, kills its train stage once `least` steps are saved; returns the folder of that run."""
    before = set(workspace.root.glob("runs/*/order.json"))

    def run() -> Path | None:
        return next(
            (path.parent for path in workspace.root.glob("runs/*/order.json") if path not in before), None
        )

    with subprocess.Popen(
        ["dvc", "repro"],
        cwd=workspace.root,
        env=workspace.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as running:
        wait_until(lambda: running.poll() is not None or newest_checkpoint(run()) >= least, 120)
        for process in processes(workspace, "tasks.train"):
            process.send_signal(signal.SIGKILL)
        assert running.wait(60) != 0, "the stage ended before it was killed"
    wait_until(lambda: not processes(workspace, "tasks.trainer.worker"), 30)
    return run()


def test_no_output_of_a_stage_holds_resumable_state() -> None:
    """As an output, `dvc checkout` would delete it."""
    paths = Paths(tiny.REPOSITORY)
    stages = YAML(typ="safe").load((paths.root / "dvc.yaml").read_text())["stages"].values()
    listed = [out for stage in stages for kind in ("outs", "plots", "metrics") for out in stage.get(kind, ())]
    outs = {paths.root / (next(iter(out)) if isinstance(out, dict) else out) for out in listed}
    assert paths.final in outs and paths.prepared in outs
    for kept in (paths.run("key"), paths.flow_lock, paths.preparing, paths.prefect_home):
        assert not outs & {kept, *kept.parents}


# Quick tests hold the parts of it: the one above; test_kill.py (a killed run goes on from its checkpoint, bit for
# bit); of test_pipeline.py test_a_new_recipe_trains_and_going_back_does_not and test_a_deleted_output_comes_back.
@pytest.mark.slow
def test_an_older_revision_and_back_loses_no_unfinished_run(finished: Workspace, tmp_path: Path) -> None:
    workspace = finished.copy(tmp_path / "workspace")
    paths = Paths(workspace.root)
    workspace.must("git", "add", "-A")
    workspace.must("git", *IDENTITY, "commit", "-qm", "trained")
    first, first_key = workspace.weights(), FinalManifest.read(paths.final / "manifest.json").run_key

    workspace.change(**{"train.num_train_epochs": 30})
    run = half_trained(workspace, least=20)
    assert run.name != first_key
    saved, log = newest_checkpoint(run), (run / "steps.jsonl").read_text().splitlines()
    assert not (run / "finished").exists()

    workspace.must("git", *IDENTITY, "stash", "--quiet")
    assert "num_train_epochs: 4\n" in paths.params.read_text()
    workspace.must("dvc", "checkout")
    assert FinalManifest.read(paths.final / "manifest.json").run_key == first_key
    assert same(workspace.weights(), first)
    workspace.must("dvc", "repro")

    workspace.must("git", "checkout", "--quiet", "--", ".")
    workspace.must("git", *IDENTITY, "stash", "pop", "--quiet")
    workspace.must("dvc", "checkout")
    done = workspace.must("dvc", "repro")
    told = re.search(rf"run {run.name} goes on from step (\d+)", done.stdout + done.stderr)
    assert told and int(told[1]) == saved >= 20
    # A line holds its step's wall time, so equal lines were not trained again.
    assert (run / "steps.jsonl").read_text().splitlines()[:saved] == log[:saved]
    assert TrainPerformance.read(paths.train_performance).starts == 2
    resumed, steps = workspace.weights(), TrainReport.read(paths.train_report).steps
    assert saved < steps

    forget_training(workspace)
    workspace.must("python", "-m", "tasks.train")
    assert TrainPerformance.read(paths.train_performance).starts == 1
    assert same(workspace.weights(), resumed)
