"""The planner's own choice for GPUs of which only some memory may be used, trained for a few steps.

Usage: python -m benchmarks.zero_capped [--gib 24] [--shape qwen2.5-7b] [--method full] [--gpus 2]
Random weights of true shape. The prediction is written before the plan is run. What torch keeps outside of its cap
(CUDA context, NCCL) is in the planner's terms and not in the measured ones.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.native_launch import ROOT, launch, request_of
from benchmarks.native_variants import SHAPES
from benchmarks.process_tree import host_peak
from benchmarks.record import RESULTS, write
from tasks.contracts import Candidate, Plan
from tasks.params import read_params
from tasks.planner.capabilities import TRAINABLE_NOW
from tasks.planner.model_spec import model_spec
from tasks.planner.problem import Pins, Problem
from tasks.planner.search import search
from tasks.planner.workload import Workload
from tasks.probe_hardware import read_machine
from tasks.trainer.trial import TrialResult

GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=24)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen2.5-7b")
    parser.add_argument("--method", choices=["full", "lora"], default="full")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    candidate = choice(options)
    figures = {
        "shape": options.shape,
        "method": options.method,
        "cap_gib": options.gib,
        "sequence": options.length,
        **predicted(candidate),
        "measured": None,
    }
    name = f"zero-capped-{options.shape}-{options.method}"
    print(json.dumps(figures), flush=True)
    write(name, figures, options.out)
    figures["measured"] = measured(candidate.plan, options)
    print(json.dumps(figures["measured"]), flush=True)
    write(name, figures, options.out)


def choice(options: argparse.Namespace) -> Candidate:
    """What the planner takes for GPUs that have no more memory than is allowed here."""
    hardware = read_machine("auto", os.environ, Path("/"))
    small = tuple(
        gpu.model_copy(update={"memory_bytes": int(options.gib * GIB)})
        for gpu in hardware.gpus[: options.gpus]
    )
    problem = Problem(
        spec=model_spec(SHAPES[options.shape]),
        hardware=hardware.model_copy(update={"gpus": small}),
        work=Workload(options.method, "bfloat16", options.length, float(options.length)),
        batch=options.batch,
        capabilities=TRAINABLE_NOW,
        pins=Pins(compiled=False),
        evaluation_rows=1,
        steps=1000,
    )
    return search(problem).fitting[0]


def predicted(candidate: Candidate) -> dict[str, Any]:
    plan, cost = candidate.plan, candidate.estimate
    assert cost is not None
    return {
        "plan": plan.name,
        "micro_batch": plan.micro_batch,
        "accumulation": plan.accumulation,
        "activation_checkpointing": plan.activation_checkpointing,
        "predicted": {
            "seconds": round(cost.total_seconds, 2),
            "tokens_per_second": round(cost.tokens_per_second),
            "gib": round((cost.total_bytes - cost.memory_bytes["fixed"]) / GIB, 1),
            "host_gib": round(sum(cost.host_bytes.values()) / GIB, 1),
            "gib_by_term": {term: round(size / GIB, 2) for term, size in cost.memory_bytes.items()},
            "seconds_by_term": {term: round(taken, 3) for term, taken in cost.seconds.items()},
            "host_gib_by_term": {term: round(size / GIB, 1) for term, size in cost.host_bytes.items()},
        },
    }


def measured(plan: Plan, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step and peaks, on GPUs and host; or why there are none."""
    os.environ["CAP_GIB"] = str(options.gib)
    train = read_params(ROOT / "params.yaml").train.model_copy(update={"finetuning_type": options.method})
    with tempfile.TemporaryDirectory() as folder, host_peak() as host:
        told = Path(folder) / "result.json"
        asked = request_of(
            SHAPES[options.shape], plan, train, "bfloat16", options.length, options.steps, Path(folder)
        )
        failed = launch("benchmarks.capped_trial", plan, (asked, told), options.seconds)
        result = TrialResult.read(told) if told.is_file() else None
    host_gib = {"host_gib": round(host[0] / GIB, 1)}
    if result is None or result.seconds is None or result.peak_bytes is None:
        return {"error": (result.failed if result else None) or failed or "no result"} | host_gib
    return {
        "seconds": round(result.seconds, 2),
        "tokens_per_second": round(plan.global_batch * options.length / result.seconds),
        "gib": round(result.peak_bytes / GIB, 1),
    } | host_gib


if __name__ == "__main__":
    main()
