"""Stage train: brings checkpoints/final up to date, whatever happened before.

The trained model of this RunKey is there already, or finished in runs/, or in the DVC remote, or
half-trained in runs/, or not begun: each case goes on from where it stands.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tasks.contracts import (
    BaseModelRef,
    CheckpointManifest,
    DataManifest,
    FinalManifest,
    HardwareProfile,
    Plan,
    PlanReport,
    TrainPerformance,
    TrainReport,
)
from tasks.errors import PREEMPTED_EXIT_CODE, UserError
from tasks.params import Params
from tasks.paths import Paths
from tasks.run_key import run_key
from tasks.stage import die_with_parent, heartbeat, say, stage_main
from tasks.trainer.guards import run_lock
from tasks.trainer.run_state import count_start, freeze
from tasks.trainer.worker import WorkerOrder

# In runs/<RunKey>: the user wants this recipe trained here and now, so no remote is asked.
FROM_SCRATCH = "from_scratch"


def train(params: Params, paths: Paths) -> TrainReport:
    """Trains, resumes, or finds that nothing is to do; returns what was learned.

    Raises:
        UserError: a user's mistake, or another train stage holds this run.
        RuntimeError: the workers failed (their output says why).
    """
    key = run_key(params, DataManifest.read(paths.manifest), BaseModelRef.read(paths.base_ref))
    run = paths.run(key)
    if _has_final(paths, key):
        say(f"train: checkpoints/final already holds run {key}")
        _restore_reports(paths, run)
        return TrainReport.read(paths.train_report)
    with run_lock(run):
        if not (run / "finished" / "complete").is_file():
            if not (run / FROM_SCRATCH).is_file() and _pulled(paths, key):
                _restore_reports(paths, run)
                return TrainReport.read(paths.train_report)
            _run_workers(paths, run, key)
        else:
            say(f"train: run {key} was trained before; taking it over from runs/")
        _take_over(paths, run)
    return TrainReport.read(paths.train_report)


def _has_final(paths: Paths, key: str) -> bool:
    manifest = paths.final / "manifest.json"
    return manifest.is_file() and FinalManifest.read(manifest).run_key == key


def _pulled(paths: Paths, key: str) -> bool:
    """Asks a configured DVC remote for the trained model; a remote out of reach is said, not fatal."""
    dvc = shutil.which("dvc", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if dvc is None or not (paths.root / "dvc.lock").is_file():
        return False
    listed = subprocess.run(
        [dvc, "remote", "list"], cwd=paths.root, capture_output=True, text=True, check=False
    )
    if listed.returncode or not listed.stdout.strip():
        return False
    with heartbeat("asking the DVC remote for the trained model"):
        asked = subprocess.run(
            [dvc, "pull", "--force", "train"],
            cwd=paths.root,
            capture_output=True,
            text=True,
            check=False,
        )
    if asked.returncode:
        say(
            f"train: the DVC remote has no trained model for dvc.lock: {asked.stderr.strip().splitlines()[-1:]}"
        )
    return _has_final(paths, key)


def _run_workers(paths: Paths, run: Path, key: str) -> None:
    report = PlanReport.read(paths.plan)
    hardware = HardwareProfile.read(paths.hardware)
    plan = report.chosen.plan
    resolved = freeze(run, report.resolved)
    if resolved != report.resolved:
        say(f"train: this run began with {resolved.model_dump()}, and that stays for the whole of it")
    WorkerOrder(run_key=key, plan=plan, resolved=resolved, starts=count_start(run)).write(run / "order.json")
    (run / "user_error").unlink(missing_ok=True)
    newest = _newest_step(run)
    from_where = f"goes on from step {newest}" if newest else "starts"
    say(f"train: run {key} {from_where}, {plan.processes} worker(s), plan {plan.name}")
    code = launch(plan, hardware, run, paths)
    if code == 0:
        return
    if (run / "user_error").is_file():
        raise UserError((run / "user_error").read_text(encoding="utf-8"))
    raise RuntimeError(
        f"a worker of run {key} ended with code {code}; its output is above, its state in {run}"
    )


def _newest_step(run: Path) -> int | None:
    manifests = [CheckpointManifest.read(path) for path in (run / "checkpoints").glob("step-*/manifest.json")]
    return max((manifest.step for manifest in manifests), default=None)


def launch(plan: Plan, hardware: HardwareProfile, run: Path, paths: Paths) -> int:
    """Starts torchrun with one worker a device and waits; returns its exit code.

    SIGTERM and SIGUSR1 are handed on to the workers: they save and end, and this process with them.

    Raises:
        SystemExit: with code 75 after such a signal.
    """
    environment = dict(os.environ)
    threads = max(1, hardware.cpu_cores // plan.processes)
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Micro-batches of many lengths leave a caching allocator with holes that only growing segments fill.
    environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # torchrun's standalone rendezvous takes a free port; the loopback name keeps it off the network.
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"),
        *(f"--nproc-per-node={plan.processes}", "--max-restarts=0"),
        *("-m", "tasks.trainer.worker", run.name),
    ]
    agent = subprocess.Popen(command, cwd=paths.root, env=environment, preexec_fn=die_with_parent)  # noqa: PLW1509

    told: list[int] = []

    before_it = _newest_step(run)

    def hand_on(number: int, frame: object) -> None:
        told.append(number)
        _tell_workers(agent.pid)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        code = agent.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if told and code:
        newest = _newest_step(run)
        state = "saved" if newest != before_it else "older, nothing was saved at the end"
        say(
            f"train: stopped by a signal, its state (step {newest or 0}) is {state}; the next run goes on from there"
        )
        raise SystemExit(PREEMPTED_EXIT_CODE)
    return code


def _tell_workers(agent: int) -> None:
    """SIGTERM to torchrun's workers; to torchrun itself only before it has any, for it kills them after 30 seconds,
    which a large model's save may well take.
    """
    try:
        below = psutil.Process(agent).children(recursive=True)
        workers = [process for process in below if "tasks.trainer.worker" in process.cmdline()]
        for process in workers or [psutil.Process(agent)]:
            process.terminate()
    except psutil.NoSuchProcess:
        return  # it ended by itself


def _take_over(paths: Paths, run: Path) -> None:
    """Copies the finished run to checkpoints/final and writes the reports, each at once."""
    fresh = paths.final.with_name(".final.new")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(run / "finished" / "final", fresh)
    shutil.rmtree(paths.final, ignore_errors=True)
    fresh.rename(paths.final)
    _restore_reports(paths, run)


def _restore_reports(paths: Paths, run: Path) -> None:
    """The stage's reports, from what lies beside the weights (they carry it wherever DVC takes them).

    Speed belongs to a machine, not to the weights: where this one has not measured any, the report
    says that no step was timed here.
    """
    _copy(paths.final / "train_report.json", paths.train_report)
    _copy(paths.final / "train_curves.csv", paths.curves)
    measured = run / "finished" / "train_performance.json"
    if _timed(measured, run.name):
        _copy(measured, paths.train_performance)
        return
    if _timed(paths.train_performance, run.name):
        return
    TrainPerformance(
        run_key=run.name,
        plan=PlanReport.read(paths.plan).chosen.plan,
        hardware=HardwareProfile.read(paths.hardware).identity,
        steps_timed=0,
        tokens_per_second=0.0,
        seconds_per_step=0.0,
        train_seconds=0.0,
        starts=0,
        ranks=(),
        advice="This model was trained elsewhere; nothing was timed here.",
    ).write(paths.train_performance)


def _timed(file: Path, run_key: str) -> bool:
    """Whether a performance report is there, of this run, and not of an earlier version that told other things."""
    try:
        return TrainPerformance.read(file).run_key == run_key
    except UserError:
        return False


def _copy(source: Path, target: Path) -> None:
    fresh = target.with_name(f".{target.name}.new")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, fresh)
    fresh.replace(target)


def main() -> None:
    stage_main("train", train)


if __name__ == "__main__":
    main()
