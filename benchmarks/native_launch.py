"""Starts a plan's ranks as the trainer does, under a time limit, and leaves nothing of them running."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.contracts import Plan, Precision
from tasks.params import TrainParams
from tasks.stage import die_with_parent
from tasks.trainer.trial import TrialRequest

ROOT = Path(__file__).parents[1]
LEAST_SECONDS = 25  # no run is begun with less than this left
_CAUSE = re.compile(r"\b\w*(Error|Exception)\b.*:")


def launch(module: str, plan: Plan, files: tuple[Path, Path], seconds: float) -> str | None:
    """Runs `module` on the plan's ranks; the sentence why it failed, or None. Nothing of it is left running."""
    environment = dict(os.environ)
    threads = max(1, (os.cpu_count() or 1) // plan.processes)
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"),
        *(f"--nproc-per-node={plan.processes}", "--max-restarts=0", "-m", module, *map(str, files)),
    ]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=ROOT,
            stdout=said,
            stderr=said,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 (no thread is running here)
        )
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            # The ranks ask the kernel to die with their agent.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"not done in {seconds:.0f} s"
        if code == 0:
            return None
        said.seek(0)
        lines = [line.strip() for line in said.read().splitlines() if line.strip()]
    causes = [line for line in lines if _CAUSE.search(line) and "ChildFailedError" not in line]
    return f"code {code}: {(causes or lines or ['no output'])[-1][:400]}"


def request_of(
    shape: dict[str, Any],
    plan: Plan,
    train: TrainParams,
    precision: Precision,
    length: int,
    steps: int,
    folder: Path,
) -> Path:
    config, asked = folder / "config.json", folder / "request.json"
    config.write_text(json.dumps(shape))
    TrialRequest(
        config=str(config),
        plan=plan,
        train=train,
        precision=precision,
        sequence=length,
        mean_row=length,
        steps=steps,
    ).write(asked)
    return asked


def run_all(
    runs: list[tuple[str, Callable[[float], dict[str, Any]]]],
    options: argparse.Namespace,
    keep: Callable[[], object],
) -> None:
    """Calls each with the seconds it may take, prints what it gives, and keeps what there is so far."""
    begin = time.monotonic()
    for name, run in runs:
        left = options.limit - (time.monotonic() - begin)
        print(name, json.dumps(run(min(options.each, left))), flush=True)
        keep()
