"""Tries the planner's best plans for a few steps on the real hardware, and remembers how far it was off."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from tasks.contracts import Candidate, Corrections, HardwareProfile, Plan
from tasks.errors import UserError
from tasks.params import TrainParams
from tasks.paths import corrections_file
from tasks.planner.cost import regime
from tasks.planner.workload import Workload
from tasks.stage import die_with_parent, heartbeat, say
from tasks.trainer.trial import TrialRequest, TrialResult

LIMIT_SECONDS = 300


def try_plans(
    config: Path,
    candidates: Sequence[Candidate],
    train: TrainParams,
    work: Workload,
    hardware: HardwareProfile,
    steps: int,
) -> list[TrialResult]:
    """Runs each candidate's plan under torchrun; one that fails says why and never ends the stage."""
    results = []
    for number, candidate in enumerate(candidates, 1):
        request = TrialRequest(
            config=str(config),
            plan=candidate.plan,
            train=train,
            precision=work.precision,
            sequence=work.sequence,
            mean_row=max(2, round(work.mean_row)),
            document=None if work.attended is None else max(2, round(work.attended)),
            steps=steps,
        )
        compiled = ", compiled" if candidate.plan.compiled else ""
        name = f"{candidate.plan.name}, micro-batch {candidate.plan.micro_batch}{compiled}"
        with heartbeat(f"trial {number} of {len(candidates)}: {name}"):
            result = _launch(request, hardware)
        assert candidate.estimate is not None, "search costs every candidate"
        predicted = candidate.estimate.total_seconds
        said = result.failed or f"{result.seconds:.3g} s a step"
        say(f"trial {number}: {name}: {said} (predicted {predicted:.3g} s)")
        results.append(result)
    return results


def _launch(request: TrialRequest, hardware: HardwareProfile) -> TrialResult:
    """One torchrun of the trial worker; its output is shown only when it fails."""
    with tempfile.TemporaryDirectory(prefix="elastane-trial-") as name:
        asked, told = Path(name) / "request.json", Path(name) / "result.json"
        request.write(asked)
        environment = dict(os.environ)
        environment.setdefault("OMP_NUM_THREADS", str(max(1, hardware.cpu_cores // request.plan.processes)))
        environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"),
            *(f"--nproc-per-node={request.plan.processes}", "--max-restarts=0"),
            *("-m", "tasks.trainer.trial", str(asked), str(told)),
        ]
        try:
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                timeout=LIMIT_SECONDS,
                check=False,
                preexec_fn=die_with_parent,
            )
        except subprocess.TimeoutExpired:
            return _failed(request.plan, f"not done in {LIMIT_SECONDS} s")
        if told.is_file():
            return TrialResult.read(told)
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return _failed(request.plan, f"ended with code {done.returncode}: {last}")


def _failed(plan: Plan, why: str) -> TrialResult:
    return TrialResult(plan=plan, seconds=None, peak_bytes=None, failed=why)


def read_corrections(hardware: HardwareProfile) -> Mapping[str, float]:
    """What earlier trials on this machine taught: measured over predicted seconds by `regime`."""
    path = corrections_file(hardware.identity)
    if not path.is_file():
        return {}
    try:
        return Corrections.read(path).factors
    except UserError:  # written by another version of the contract: nothing is known
        return {}


def learn(
    hardware: HardwareProfile,
    work: Workload,
    candidates: Sequence[Candidate],
    results: Sequence[TrialResult],
) -> Mapping[str, float]:
    """Updates this machine's corrections by what was measured and returns them all.

    The factors multiply those the candidates' estimates already hold, so that a second round refines the first.
    """
    before = read_corrections(hardware)
    ratios: dict[str, list[float]] = defaultdict(list)
    for candidate, result in zip(candidates, results, strict=True):
        if result.seconds is not None and candidate.estimate is not None:
            ratios[regime(work, candidate.plan)].append(result.seconds / candidate.estimate.total_seconds)
    learnt = {key: before.get(key, 1.0) * statistics.median(values) for key, values in ratios.items()}
    factors = {**before, **learnt}
    Corrections(identity=hardware.identity, factors=factors).write(corrections_file(hardware.identity))
    return factors


def by_measurement(
    candidates: Sequence[Candidate], results: Sequence[TrialResult], compiling: float = 0.0
) -> tuple[list[Candidate], list[Candidate]]:
    """The tried candidates that ran, fastest first, and those that failed, with why.

    `compiling` is a step's share, in seconds, in the time that compiling takes before the first.
    """
    ran = [
        (result.seconds + compiling * candidate.plan.compiled, candidate)
        for candidate, result in zip(candidates, results, strict=True)
        if result.seconds is not None
    ]
    order = sorted(ran, key=lambda pair: pair[0])
    failed = [
        candidate.model_copy(update={"rejected": f"in a trial on this machine it {_past(result.failed)}"})
        for candidate, result in zip(candidates, results, strict=True)
        if result.failed is not None
    ]
    return [candidate for _, candidate in order], failed


def _past(why: str) -> str:
    return why if why.startswith(("ran", "ended")) else f"was {why}"
