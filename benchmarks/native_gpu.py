"""The native engine on one and two GPUs: tokens/s and memory, predicted beside measured, and losses that agree.

Usage: python -m benchmarks.native_gpu --set single|pair|qlora [--shape NAME ...] [--only WORDS ...] [--steps N]
   or: python -m benchmarks.native_gpu --agree [--method lora|full] [--layers N]
Random weights of true shape: no network, no data. Every prediction is written before its plan is run. Each plan runs
in processes of its own under a time limit; what the planner refuses is not run, and the refusal is the result.
`--shape tiny --device cpu` tries the script itself.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.native_launch import LEAST_SECONDS, ROOT, launch, request_of, run_all
from benchmarks.native_variants import AGREEMENTS, ROWS, SETS, SHAPES, Agreement, Variant
from benchmarks.process_tree import host_peak
from benchmarks.record import RESULTS, write
from tasks.contracts import HardwareProfile, Plan, Precision
from tasks.params import read_params
from tasks.planner.cost import CostModel
from tasks.planner.ground import Ground
from tasks.planner.legal import broken
from tasks.planner.machine import machine
from tasks.planner.model_spec import model_spec
from tasks.planner.workload import Workload
from tasks.probe_hardware import read_machine
from tasks.trainer.trial import TrialResult

GIB = 2**30


# --- what the planner says --------------------------------------------------------------------


def predict(variant: Variant, plan: Plan, hardware: HardwareProfile, precision: Precision) -> dict[str, Any]:
    """Seconds, tokens/s and GiB of a step, and the sentence why the plan cannot be, if so."""
    spec = model_spec(SHAPES[variant.shape])
    length = variant.length
    work = Workload(method=variant.method, precision=precision, sequence=length, mean_row=length)
    cost = CostModel(spec, work, machine(hardware, precision), 0.1, 1)
    estimate = cost.estimate(plan)
    ranks = max(1, len(hardware.gpus)) if hardware.device == "cuda" else 2
    rule = broken(plan, Ground(spec, work, hardware, plan.global_batch, ranks, ranks))
    need, have = estimate.peak_bytes / GIB, estimate.memory_limit_bytes / GIB
    fits = cost.fits(estimate)
    return {
        "seconds": round(estimate.total_seconds, 4),
        "tokens_per_second": round(estimate.tokens_per_second),
        # Of what torch reserves; the driver's context comes on top.
        "gib": round((estimate.total_bytes - estimate.memory_bytes["fixed"]) / GIB, 1),
        "refused": rule.sentence if rule else None if fits else f"needs {need:.1f} GiB of {have:.1f}",
        "seconds_by_term": {term: round(taken, 4) for term, taken in estimate.seconds.items()},
        "host_gib": round(sum(estimate.host_bytes.values()) / GIB, 1),
        "gib_by_term": {term: round(size / GIB, 2) for term, size in estimate.memory_bytes.items()},
    }


# --- speed ------------------------------------------------------------------------------------


def measure(variant: Variant, plan: Plan, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    train = read_params(ROOT / "params.yaml").train.model_copy(update={"finetuning_type": variant.method})
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        told = Path(name) / "result.json"
        asked = request_of(
            SHAPES[variant.shape], plan, train, options.precision, variant.length, options.steps, Path(name)
        )
        module = "benchmarks.native_loose" if options.loose else "tasks.trainer.trial"
        with host_peak() as host:
            failed = launch(module, plan, (asked, told), seconds)
        result = TrialResult.read(told) if told.is_file() else None
    wall = {"wall_seconds": round(time.monotonic() - begin, 1), "host_gib": round(host[0] / GIB, 1)}
    if result is None or result.seconds is None:
        return {"error": (result.failed if result else None) or failed or "no result"} | wall
    return {
        "seconds": round(result.seconds, 4),
        "tokens_per_second": round(plan.global_batch * variant.length / result.seconds),
        "gib": None if result.peak_bytes is None else round(result.peak_bytes / GIB, 1),
        "error": None,
    } | wall


def speed(options: argparse.Namespace, hardware: HardwareProfile) -> None:
    """Writes all predictions, then runs what is not refused, and writes again after each."""
    variants = [variant for shape in options.shape for variant in SETS[options.set](shape)]
    if options.only:
        variants = [variant for variant in variants if any(words in variant.name for words in options.only)]
    rows: list[dict[str, Any]] = []
    for variant in variants:
        plan = variant.plan(options.device)
        rows.append(
            {
                "name": variant.name,
                "plan": plan.name,
                "predicted": predict(variant, plan, hardware, options.precision),
                "measured": None,
            }
        )
    name = f"native-gpu-{options.set}" + (f"-{options.suffix}" if options.suffix else "")
    figures = {
        "precision": options.precision,
        "steps": options.steps,
        "rounds_alike": not options.loose,
        "rows": rows,
    }
    write(name, figures, options.out)
    run_all(
        [(row["name"], _run_of(variant, row, options)) for variant, row in zip(variants, rows, strict=True)],
        options,
        lambda: write(name, figures | summary(rows), options.out),
    )
    print(json.dumps(summary(rows)))


def _run_of(
    variant: Variant, row: dict[str, Any], options: argparse.Namespace
) -> Callable[[float], dict[str, Any]]:
    def run(seconds: float) -> dict[str, Any]:
        refused = row["predicted"]["refused"]
        if refused and not options.force:
            row["measured"] = {"error": f"not run: the planner refuses it, {refused}"}
        elif seconds < LEAST_SECONDS:
            row["measured"] = {"error": "not run: out of time"}
        else:
            row["measured"] = measure(variant, variant.plan(options.device), options, seconds)
        short = {key: row["predicted"][key] for key in ("seconds", "tokens_per_second", "gib")}
        return {"predicted": short, "measured": row["measured"]}

    return run


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How far predictions were off, in percent, and what share of twice one GPU two copies reach."""
    done = [row for row in rows if (row["measured"] or {}).get("seconds")]
    figures: dict[str, Any] = {"ran": len(done), "off_percent": {}, "share_of_twice_one": {}}
    for row in done:
        predicted, measured = row["predicted"], row["measured"]
        kinds = [kind for kind in ("seconds", "gib") if measured[kind]]
        figures["off_percent"][row["name"]] = {
            kind: round(100 * (predicted[kind] / measured[kind] - 1), 1) for kind in kinds
        }
        alone = next((r for r in done if r["name"] == row["name"].replace(" ddp2 ", " single ")), None)
        if alone is not None and " ddp2 " in row["name"]:
            ratio = measured["tokens_per_second"] / (2 * alone["measured"]["tokens_per_second"])
            figures["share_of_twice_one"][row["name"]] = round(ratio, 4)
    return figures


# --- agreement --------------------------------------------------------------------------------


def agree(options: argparse.Namespace) -> None:
    """The first steps' losses and norms under each layout, held against those of one process."""
    rows: list[dict[str, Any]] = []
    for shape in options.shape:
        chosen = [one for one in AGREEMENTS if not options.only or any(w in one.name for w in options.only)]
        chosen = [one for one in chosen if not (one.compiled and options.device == "cpu")]
        if AGREEMENTS[0] not in chosen:
            chosen.insert(0, AGREEMENTS[0])
        rows += [{"name": f"{shape} {one.name}", "shape": shape, "agreement": one} for one in chosen]
    name = f"native-gpu-agree-{options.method}" + (f"-{options.suffix}" if options.suffix else "")
    figures = {"method": options.method, "layers": options.layers, "rows_a_step": ROWS, "rows": rows}

    def keep() -> None:
        plain = [{key: value for key, value in row.items() if key != "agreement"} for row in rows]
        write(name, figures | {"rows": plain}, options.out)

    run_all([(row["name"], _agreement_of(row, rows, options)) for row in rows], options, keep)


def _agreement_of(
    row: dict[str, Any], rows: list[dict[str, Any]], options: argparse.Namespace
) -> Callable[[float], dict[str, Any]]:
    def run(seconds: float) -> dict[str, Any]:
        if seconds < LEAST_SECONDS:
            row["told"] = {"error": "not run: out of time"}
        else:
            row["told"] = told_by(row["agreement"], row["shape"], options, seconds)
        first = next(one for one in rows if one["shape"] == row["shape"])["told"]
        if "losses" in row["told"] and "losses" in first:
            row["largest_relative_difference"] = {
                kind: max(abs(a / b - 1) for a, b in zip(row["told"][kind], first[kind], strict=True))
                for kind in ("losses", "norms")
            }
        return {key: value for key, value in row.items() if key in ("told", "largest_relative_difference")}

    return run


def told_by(one: Agreement, shape: str, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    plan = Variant(shape, options.method, one.layout, one.micro, one.accumulation, compiled=one.compiled)
    steady = {"finetuning_type": options.method, "lr_scheduler_type": "constant", "warmup_ratio": 0.0}
    rate = {"learning_rate": 1e-3 if options.method == "lora" else 1e-5}
    train = read_params(ROOT / "params.yaml").train.model_copy(update=steady | rate)
    shallow = SHAPES[shape] | {"num_hidden_layers": options.layers}
    with tempfile.TemporaryDirectory() as name:
        told, made = Path(name) / "told.json", plan.plan(options.device)
        asked = request_of(shallow, made, train, one.precision, plan.length, options.steps, Path(name))
        failed = launch("benchmarks.native_agree", made, (asked, told), seconds)
        if failed or not told.is_file():
            return {"error": failed or "no result"}
        result: dict[str, Any] = json.loads(told.read_text(encoding="utf-8"))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", choices=list(SETS), default="single")
    parser.add_argument("--agree", action="store_true", help="compare losses instead of speed")
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["qwen2.5-7b"])
    parser.add_argument("--only", nargs="+", help="variants whose name contains one of these")
    parser.add_argument("--method", choices=["lora", "full"], default="lora", help="of --agree")
    parser.add_argument("--layers", type=int, default=4, help="of --agree")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--loose", action="store_true", help="compiled kernels may round less than plain layers"
    )
    parser.add_argument("--force", action="store_true", help="run what the planner refuses, too")
    parser.add_argument("--limit", type=float, default=560, help="seconds for all")
    parser.add_argument("--each", type=float, default=120, help="seconds for one variant")
    parser.add_argument("--suffix", help="of the result's file name")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    hardware = read_machine(options.device, os.environ, Path("/"))
    if options.agree:
        agree(options)
    else:
        speed(options, hardware)


if __name__ == "__main__":
    main()
