"""The flow: six tasks in a row, each brings one DVC stage up to date."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.client.schemas.objects import TaskRun
from prefect.states import State

from flows.artifacts import publish_data, publish_plan, publish_result
from flows.process import StageFailed, run_stage
from flows.workspace import flow_lock, prepare_stores
from tasks.contracts import BaseModelRef, DataManifest, Registration
from tasks.params import Params, read_params
from tasks.paths import Paths
from tasks.registry import what_is_missing
from tasks.run_key import run_key
from tasks.stage import say
from tasks.tracking_store import StoreOutOfReach
from tasks.train import FROM_SCRATCH

TRAIN_RETRIES = 2
RETRY_DELAY_SECONDS = 5


@dataclass(frozen=True)
class Outcome:
    """What a run of the flow did: stages that ran anew, in order."""

    ran: tuple[str, ...]


def _is_our_fault(task_: Any, run: TaskRun, state: State[Any]) -> bool:
    """Retries a stage that failed by no mistake, and a machine that could not start it; nothing else."""
    error = state.result(raise_on_failure=False)
    return error.retry if isinstance(error, StageFailed) else isinstance(error, OSError)


@task(name="prepare_data")
def prepare_data(root: Path, force: bool) -> bool:
    ran = run_stage(root, "prepare_data", force=force)
    if ran:
        paths = Paths(root)
        publish_data(read_params(paths.params), paths)
    return ran


@task(name="probe_hardware")
def probe_hardware(root: Path) -> bool:
    return run_stage(root, "probe_hardware")


@task(name="select_strategy")
def select_strategy(root: Path, force: bool) -> bool:
    ran = run_stage(root, "select_strategy", force=force)
    publish_plan(Paths(root))
    return ran


@task(
    name="train",
    retries=TRAIN_RETRIES,
    retry_delay_seconds=RETRY_DELAY_SECONDS,
    retry_condition_fn=_is_our_fault,
)
def train(root: Path, force: bool) -> bool:
    return run_stage(root, "train", force=force)


@task(name="evaluate")
def evaluate(root: Path) -> bool:
    return run_stage(root, "evaluate")


@task(name="register")
def register(root: Path) -> bool:
    ran = run_stage(root, "register") or _register_again(Paths(root))
    publish_result(Paths(root))
    return ran


def _register_again(paths: Paths) -> bool:
    """Runs a stage that DVC holds for up to date, if MLflow's store has lost what it registered."""
    try:
        missing = what_is_missing(
            Registration.read(paths.registration), read_params(paths.params).register_, paths
        )
    except StoreOutOfReach as error:
        say(f"── register: {error}; nobody looked whether the version is still there")
        return False
    if missing is None:
        return False
    say(f"── register: {missing}, so it is registered again")
    return run_stage(paths.root, "register", force=True)


STAGE_TASKS = (prepare_data, probe_hardware, select_strategy, train, evaluate, register)


@flow(name="finetune", log_prints=False)
def finetune(workspace: str | None = None, retrain: bool = False) -> Outcome:
    """Brings the workspace's pipeline up to date, one stage after another.

    Args:
        workspace: its folder; the current one unless given.
        retrain: train anew although nothing changed.

    Raises:
        UserError: params.yaml is wrong, or another run holds the workspace.
        StageFailed: a stage failed, with its exit code.
    """
    from tasks.deepspeed_file import file_changed
    from tasks.prepare_data import inputs_changed

    root = Path(workspace or os.getcwd()).resolve()
    os.chdir(root)
    paths = Paths.here()
    params = read_params(paths.params)
    with flow_lock(paths):
        prepare_stores(params, paths)
        ran = [
            ("prepare_data", prepare_data(root, inputs_changed(params, paths))),
            ("probe_hardware", probe_hardware(root)),
            ("select_strategy", select_strategy(root, file_changed(params, paths))),
        ]
        if retrain:
            # Here and not in the task: a retry goes on with what the first try has trained.
            forget_training(params, paths)
        ran += [("train", train(root, retrain)), ("evaluate", evaluate(root)), ("register", register(root))]
    return Outcome(tuple(name for name, did in ran if did))


def forget_training(params: Params, paths: Paths) -> None:
    """Moves what was trained of this recipe aside, so that training begins at step 0, whatever DVC's remote holds."""
    key = run_key(params, DataManifest.read(paths.manifest), BaseModelRef.read(paths.base_ref))
    run = paths.run(key)
    if run.is_dir():
        number = sum(1 for _ in paths.runs.glob(f"{run.name}.old-*")) + 1
        run.rename(run.with_name(f"{run.name}.old-{number}"))
    run.mkdir(parents=True)
    (run / FROM_SCRATCH).touch()
    manifest = paths.final / "manifest.json"
    if manifest.is_file():
        manifest.rename(manifest.with_name("manifest.old.json"))
