"""The deployment at a real Prefect server: schedule, retry, one run at a time, cancellation.

With ELASTANE_RECORD=1 the figures go to benchmarks/results/deployment.json.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import record
from tests.pipeline.kill import processes, wait_until
from tests.pipeline.prefect_services import ServedWorkspace, prefect_server, started
from tests.pipeline.workspace import make_workspace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DEPLOYMENT = "finetune/workspace"
TREE = ("prefect.engine", "dvc", "tasks.train", "torch.distributed.run", "tasks.trainer.worker")
LONG = {"train.num_train_epochs": 2000, "train.token_budget_on_cpu": 10**9}
MEASURED = {"retry", "schedule", "second_run", "cancel"}
SHORT = {"train.num_train_epochs": 100, "train.token_budget_on_cpu": 10**9}


@pytest.fixture(scope="module")
def figures() -> Iterator[dict[str, Any]]:
    """What was seen; recorded at the end when that is asked for and every test had its say."""
    seen: dict[str, Any] = {}
    yield seen
    if os.environ.get("ELASTANE_RECORD") == "1" and seen.keys() == MEASURED:
        record.write("deployment", seen)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedWorkspace]:
    """A workspace whose first training is long, with a server and a worker; not deployed yet."""
    folder = tmp_path_factory.mktemp("deployment")
    workspace = make_workspace(folder / "workspace", **SHORT)
    with prefect_server(workspace, folder) as at_server:
        deployed = at_server.must("elastane", "deploy")
        assert f"deployed {DEPLOYMENT} when asked" in deployed.stderr
        worker = ["prefect", "worker", "start", "--pool", "elastane"]
        with started(worker, folder, at_server.environment, folder / "worker.log"):
            yield at_server


def deployment(served: ServedWorkspace) -> dict[str, Any]:
    return served.ask("GET", f"deployments/name/{DEPLOYMENT}")


def state(served: ServedWorkspace, flow_run: str) -> str:
    return served.ask("GET", f"flow_runs/{flow_run}")["state"]["type"]


def run_now(served: ServedWorkspace) -> str:
    """Asks for a run of the deployment, as `prefect deployment run` does; returns its id."""
    return served.ask("POST", f"deployments/{deployment(served)['id']}/create_flow_run", parameters={})["id"]


def wait_for_state(served: ServedWorkspace, flow_run: str, wanted: str, seconds: float) -> None:
    wait_until(lambda: state(served, flow_run) == wanted, seconds)


def tree(served: ServedWorkspace) -> list[psutil.Process]:
    """Every live process of a flow run in this workspace, from the flow down to the ranks."""
    return [process for name in TREE for process in processes(served, name)]


def ranks(served: ServedWorkspace) -> list[psutil.Process]:
    """The training processes themselves, without the launcher, which names their module too."""
    launchers = {process.pid for process in processes(served, "torch.distributed.run")}
    return [process for process in processes(served, "tasks.trainer.worker") if process.pid not in launchers]


def steps_logged(served: ServedWorkspace) -> int:
    return sum(len(log.read_text().splitlines()) for log in served.root.glob("runs/*/steps.jsonl"))


def wait_for_training(served: ServedWorkspace) -> None:
    """Until a rank is alive and has logged new steps."""
    before = steps_logged(served)
    wait_until(lambda: bool(ranks(served)) and steps_logged(served) > before + 20, 120)


def test_a_killed_worker_is_retried_and_the_run_completes(
    served: ServedWorkspace, figures: dict[str, Any]
) -> None:
    run = run_now(served)
    wait_for_training(served)
    step = steps_logged(served)
    for rank in ranks(served):
        rank.kill()
    wait_for_state(served, run, "COMPLETED", 300)
    train = served.task_runs(run)["train"]
    assert train["state"]["type"] == "COMPLETED"
    assert train["run_count"] == 2, "killed once, so started twice"
    wait_until(lambda: not tree(served), 15)
    figures["retry"] = {"killed_after_step": step, "starts_of_train": train["run_count"], "run": "COMPLETED"}


def test_it_fires_on_schedule_and_nothing_new_costs_seconds(
    served: ServedWorkspace, figures: dict[str, Any]
) -> None:
    served.must("elastane", "run", timeout=400)
    asked = {run["id"] for run in served.flow_runs(deployment(served)["id"])}
    served.must("elastane", "deploy", "--cron", "* * * * *")

    def fired() -> list[dict[str, Any]]:
        runs = served.flow_runs(deployment(served)["id"])
        return [run for run in runs if run["id"] not in asked and run["state"]["type"] == "COMPLETED"]

    wait_until(lambda: bool(fired()), 150)
    served.ask("POST", f"deployments/{deployment(served)['id']}/pause_deployment")
    run = fired()[0]
    assert run["auto_scheduled"]
    begun = min(_time(task["start_time"]) for task in served.task_runs(run["id"]).values())
    late = (begun - _time(run["expected_start_time"])).total_seconds()
    assert 0 <= late < 60
    assert run["total_run_time"] < 30, "nothing was new"
    figures["schedule"] = {
        "cron": "* * * * *",
        "seconds_from_due_to_first_task": round(late, 1),
        "seconds_of_a_run_with_nothing_new": round(run["total_run_time"], 1),
    }


def test_a_second_run_is_refused_and_a_cancelled_one_leaves_nothing(
    served: ServedWorkspace, figures: dict[str, Any]
) -> None:
    served.change(**LONG)
    run = run_now(served)
    wait_for_training(served)
    here = {name: len(processes(served, name)) for name in TREE}
    here["tasks.trainer.worker"] = len(ranks(served))
    assert all(here.values()), here

    second = run_now(served)
    begin = time.monotonic()
    refused = served.run("elastane", "run")
    refused_after = time.monotonic() - begin
    assert refused.returncode == 2
    assert "already runs the pipeline" in refused.stderr.strip().splitlines()[-1]
    wait_for_state(served, second, "CANCELLED", 60)
    assert state(served, run) == "RUNNING", "the first run goes on"

    begin = time.monotonic()
    served.must("prefect", "flow-run", "cancel", run)
    wait_until(lambda: not tree(served), 15)
    gone_after = time.monotonic() - begin
    assert gone_after <= 10
    wait_for_state(served, run, "CANCELLED", 30)
    figures["second_run"] = {
        "of_the_deployment": "CANCELLED",
        "elastane_run_exit_code": refused.returncode,
        "elastane_run_refused_after_seconds": round(refused_after, 1),
    }
    figures["cancel"] = {"processes": here, "seconds_until_all_gone": round(gone_after, 1)}

    # What was trained before the cancellation is not lost.
    again = run_now(served)
    wait_for_training(served)
    served.must("prefect", "flow-run", "cancel", again)
    wait_until(lambda: not tree(served), 15)
    wait_for_state(served, again, "CANCELLED", 30)
    starts = re.findall(r"^train: run \w+ (.*?), ", (served.root.parent / "worker.log").read_text(), re.M)
    assert re.fullmatch(r"goes on from step \d+", starts[-1]), starts


def test_the_project_file_makes_the_same_deployment(served: ServedWorkspace) -> None:
    served.must("elastane", "deploy", "--cron", "0 4 * * *")
    ours = deployment(served)
    # A shell sets PWD, from which prefect.yaml takes the workspace.
    served.must("sh", "-c", "prefect --no-prompt deploy --all")
    theirs = deployment(served)
    assert len(served.ask("POST", "deployments/filter")) == 1
    assert theirs["schedules"][0]["schedule"]["cron"] == "0 3 * * *"
    assert str(served.root) in str(theirs["pull_steps"])
    same = ("id", "name", "work_pool_name", "entrypoint", "concurrency_options", "parameters")
    assert {key: theirs[key] for key in same} == {key: ours[key] for key in same}


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        (
            "workspace",
            "finetune/workspace at this Prefect server belongs to {0}, and a deployment is named after",
        ),
        ("a&b", "Prefect takes no / % & > < in a name ('a&b'); rename the folder"),
    ],
)
def test_a_name_that_is_taken_or_impossible_is_refused(
    served: ServedWorkspace, tmp_path: Path, folder: str, words: str
) -> None:
    (tmp_path / folder).mkdir()
    shutil.copyfile(served.root / "params.yaml", tmp_path / folder / "params.yaml")
    done = ServedWorkspace(tmp_path / folder, served.recipe, served.settings).run("elastane", "deploy")
    assert done.returncode == 2
    assert words.format(served.root) in done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "url", "words"),
    [
        (["--cron", "often"], None, "--cron 'often' is no schedule"),
        ([], "http://127.0.0.1:9/api", "the Prefect server does not answer"),
        ([], "", "PREFECT_API_URL is not set"),
    ],
)
def test_a_deployment_that_cannot_be_says_why(
    served: ServedWorkspace, tmp_path: Path, arguments: list[str], url: str | None, words: str
) -> None:
    changed = {} if url is None else {"PREFECT_API_URL": url, "PREFECT_HOME": str(tmp_path)}
    elsewhere = ServedWorkspace(served.root, served.recipe, {**served.settings, **changed})
    done = elsewhere.run("elastane", "deploy", *arguments)
    assert done.returncode == 2
    assert words in done.stderr.strip().splitlines()[-1]


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))
