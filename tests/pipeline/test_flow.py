"""The flow around its stages: refusal, retries, exit codes, and that nothing outlives it.

Its stages are stand-ins that only succeed, fail or sleep, under DVC and without git, as after a download.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from prefect.states import Failed

from flows.finetune import _is_our_fault, finetune
from flows.process import StageFailed
from flows.workspace import prepare_stores
from tasks.contracts import PlanReport, Resolved
from tasks.errors import PREEMPTED_EXIT_CODE, USER_ERROR_EXIT_CODE, UserError
from tasks.git_state import git_state
from tasks.params import SECTIONS
from tasks.paths import Paths
from tests import tiny
from tests.pipeline.kill import wait_until
from tests.unit.planner_cases import SMOL, cpu, plans

STAND_IN = """
import json, subprocess, sys, time
from pathlib import Path
from tasks.errors import UserError
from tasks.stage import die_with_parent, stage_main

def run(params, paths):
    attempts = Path(f"attempts-{sys.argv[1]}")
    number = len(attempts.read_text()) if attempts.is_file() else 0
    attempts.write_text("x" * (number + 1))
    what = json.loads(Path("behaviour.json").read_text()).get(sys.argv[1], ["succeed"])[number]
    if what == "fault":
        raise RuntimeError("a worker died")
    if what == "mistake":
        raise UserError("train.precision=half is no precision; use float16")
    if what == "sleep":
        subprocess.Popen(["sleep", "600"], start_new_session=True, preexec_fn=die_with_parent)
        Path("asleep").touch()
        time.sleep(600)

stage_main(sys.argv[1], run)
"""


@pytest.fixture(scope="module")
def prefect_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefect's tables are made once."""
    return tmp_path_factory.mktemp("prefect")


@pytest.fixture
def paths(tmp_path: Path, prefect_home: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    monkeypatch.setenv("PREFECT_HOME", str(prefect_home))
    paths = Paths(tmp_path)
    tiny.write_params(paths.root)
    stages = {name: {"cmd": f"exec python stand_in.py {name}", "always_changed": True} for name in SECTIONS}
    (paths.root / "dvc.yaml").write_text(json.dumps({"stages": stages}))
    (paths.root / "stand_in.py").write_text(STAND_IN)
    paths.mlflow_db.touch()  # No stand-in looks into it.
    chosen, *others = plans(cpu(2))
    resolved = Resolved(precision="float32", token_budget=None)
    PlanReport(
        chosen=chosen, why="it fits", runners_up=tuple(others[:1]), rejected=(), resolved=resolved, model=SMOL
    ).write(paths.plan)
    return paths


def behave(paths: Paths, **stages: list[str]) -> None:
    (paths.root / "behaviour.json").write_text(json.dumps(stages))


def attempts(paths: Paths, stage: str) -> int:
    file = paths.root / f"attempts-{stage}"
    return len(file.read_text()) if file.is_file() else 0


def run_flow(paths: Paths) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["elastane", "run"], cwd=paths.root, capture_output=True, text=True, timeout=200, check=False
    )


def test_a_wrong_params_file_ends_before_anything_heavy_is_loaded(paths: Paths) -> None:
    tiny.write_params(paths.root, **{"train.optim": "sgd"})
    code = (
        "import sys; from flows.cli import main; sys.argv = ['elastane', 'run']\n"
        "try: main()\n"
        "except SystemExit as end:\n"
        "    print(end.code, [name for name in ('torch', 'prefect', 'mlflow') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=paths.root, capture_output=True, text=True, check=True
    )
    assert done.stdout == "2 []\n"
    assert len(done.stderr.splitlines()) == 1
    assert "train.optim='sgd' is not allowed" in done.stderr
    assert not paths.runs.exists()


def test_a_second_run_is_refused_at_once(paths: Paths) -> None:
    paths.flow_lock.parent.mkdir(parents=True)
    begin = time.monotonic()
    with paths.flow_lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711")
        lock.flush()
        done = run_flow(paths)
    assert done.returncode == 2
    assert done.stderr.startswith("elastane: process 4711 already runs the pipeline in ")
    assert time.monotonic() - begin < 5
    assert paths.flow_lock.read_text() == "4711", "the holder's number stays"
    assert attempts(paths, "prepare_data") == 0


def test_train_is_retried_after_a_fault_and_not_after_a_mistake(paths: Paths) -> None:
    behave(paths, train=["fault", "mistake", "succeed"])
    done = run_flow(paths)
    assert done.returncode == 2, done.stderr
    assert attempts(paths, "train") == 2
    assert [attempts(paths, stage) for stage in SECTIONS] == [1, 1, 1, 2, 0, 0]
    assert (
        done.stderr.splitlines()[-1].split(": ", 1)[1]
        == "train ended with code 2: train.precision=half is no precision; use float16"
    )


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (StageFailed("train", 1, "a worker died"), True),
        (StageFailed("train", USER_ERROR_EXIT_CODE, "no such precision"), False),
        (StageFailed("train", PREEMPTED_EXIT_CODE, "told to stop"), False),
        (BlockingIOError("no process can be started"), True),
        (UserError("runs/ holds no such thing"), False),
        (KeyError("a mistake of ours"), False),
    ],
    ids=repr,
)
def test_what_is_tried_again(error: Exception, again: bool) -> None:
    assert _is_our_fault(None, None, Failed(data=error)) is again


def test_an_unpacked_source_archive_does_without_git(
    paths: Paths, capsys: pytest.CaptureFixture[str]
) -> None:
    """The archive carries the repository's DVC folder, which expects git."""
    shutil.copytree(tiny.REPOSITORY / ".dvc", paths.root / ".dvc", ignore=lambda *_: {"cache", "tmp"})
    repro = ["dvc", "repro", "-q", "-s", "probe_hardware"]
    assert subprocess.run(repro, cwd=paths.root, check=False, capture_output=True).returncode != 0
    behave(paths)
    prepare_stores(tiny.params(), paths)
    assert "core.no_scm=true in .dvc/config.local" in capsys.readouterr().err
    subprocess.run(repro, cwd=paths.root, check=True)
    assert attempts(paths, "probe_hardware") == 1
    prepare_stores(tiny.params(), paths)
    assert not capsys.readouterr().err, "said once"
    assert git_state(paths.root).described == "outside a git repository"


def family(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


@pytest.fixture
def sleeping(paths: Paths) -> Iterator[subprocess.Popen[bytes]]:
    """A run in the midst of a stage, as the only member of a terminal's foreground group."""
    behave(paths, prepare_data=["sleep"])
    running = subprocess.Popen(
        ["elastane", "run"],
        cwd=paths.root,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        # A shell that starts tests in the background has SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    try:
        wait_until(lambda: (paths.root / "asleep").is_file() or running.poll() is not None, 120)
        yield running
    finally:
        if running.poll() is None:
            for process in family(running.pid):
                process.kill()
            running.kill()
            running.wait()


@pytest.mark.parametrize("how", ["Ctrl-C", "kill -9", pytest.param("SIGTERM", marks=pytest.mark.slow)])
def test_nothing_outlives_the_flow(paths: Paths, sleeping: subprocess.Popen[bytes], how: str) -> None:
    started = family(sleeping.pid)
    lines = [" ".join(process.cmdline()) for process in started]
    for words in ("prefect.server", "dvc repro", "stand_in.py", "sleep 600"):
        assert any(words in line for line in lines), f"{words} not in {lines}"
    begin = time.monotonic()
    if how == "Ctrl-C":
        os.killpg(sleeping.pid, signal.SIGINT)
    else:
        sleeping.send_signal(signal.SIGTERM if how == "SIGTERM" else signal.SIGKILL)
    sleeping.wait(timeout=10)
    _, left = psutil.wait_procs(started, timeout=10 - (time.monotonic() - begin))
    try:
        assert not [" ".join(process.cmdline()) for process in left]
        assert sleeping.returncode != 0
    finally:
        for process in left:
            process.kill()
    with paths.flow_lock.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("changed", [False, True])
def test_a_stage_is_forced_where_a_file_that_dvc_does_not_watch_has_changed(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    """Such files are rows and templates (tests/unit/test_prepare_data.py) and a ds_config.json
    (tests/unit/test_deepspeed_config.py).
    """
    monkeypatch.setattr("tasks.prepare_data.inputs_changed", lambda params, where: changed)
    monkeypatch.setattr("tasks.deepspeed_file.file_changed", lambda params, where: not changed)
    asked: list[tuple[object, ...]] = []
    for name in SECTIONS:
        monkeypatch.setattr(f"flows.finetune.{name}", lambda *given: asked.append(given) or False)
    monkeypatch.chdir(paths.root)
    finetune.fn(str(paths.root))
    root = paths.root.resolve()
    assert asked == [(root, changed), (root,), (root, not changed), (root, False), (root,), (root,)]
