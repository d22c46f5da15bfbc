"""Tokens/s and memory of data preparation beside TRL's and LLaMA-Factory's, on the same rows and tokenizer.

Each program reads the same JSONL of chat rows and ends with token ids and labels on disk; elastane also looks for
duplicates and near-duplicates, splits, and hashes what it wrote. Counted from after the imports, loading the tokenizer
included; the programs take turns, `--rounds` times each, and the quickest round stands for each.

Usage: python -m benchmarks.data_rate --trl VENV/bin/python --llamafactory VENV/bin/python [--rows 2000 200000]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.chat_rows import write_chat_rows
from benchmarks.process_tree import MIB, Watch
from benchmarks.record import write
from tasks.params import ModelParams
from tasks.paths import Paths
from tasks.trainer.base_model import ensure_base

REPOSITORY = Path(__file__).parents[1]
BUILTIN = "smollm2-135m-instruct"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl", help="Python of an environment with TRL")
    parser.add_argument("--llamafactory", help="Python of an environment with LLaMA-Factory")
    parser.add_argument("--rows", type=int, nargs="+", default=[2000, 200_000])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--name", default="data-rate")
    options = parser.parse_args()
    pythons = {"elastane": sys.executable, "trl": options.trl, "llamafactory": options.llamafactory}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        ensure_base(ModelParams(name_or_path=BUILTIN, revision=None, trust_remote_code=False), Paths(root))
        sizes = [_size(count, pythons, root, options) for count in options.rows]
    write(
        options.name,
        {
            "tokenizer": BUILTIN,
            "max_length": options.max_length,
            "processes": options.processes,
            "rounds": options.rounds,
            "sizes": sizes,
            "ratio_to_fastest_peer": min(
                (size["ratio_to_fastest_peer"] or 0 for size in sizes), default=None
            ),
            # Of the training rows of the largest size, packed best-fit into max_length tokens each.
            "packing_fill": sizes[-1]["programs"]["elastane"]["packing_fill"],
        },
    )


def _size(
    count: int, pythons: dict[str, str | None], root: Path, options: argparse.Namespace
) -> dict[str, Any]:
    rows = root / f"rows-{count}.jsonl"
    write_chat_rows(rows, count)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name, python in pythons.items() if python}
    for _ in range(options.rounds):
        for name, found in runs.items():
            found.append(_run(name, str(pythons[name]), rows, root, options))
            print(count, name, found[-1], flush=True)
    best = {name: min(found, key=lambda run: run["seconds"]) for name, found in runs.items()}
    least = {name: max(run["tokens_per_cpu_second"] for run in found) for name, found in runs.items()}
    return {
        "rows": count,
        "bytes": rows.stat().st_size,
        "programs": best,
        "all_runs": runs,
        "ratio_to_fastest_peer": _ratio({name: run["tokens_per_second"] for name, run in best.items()}),
        "ratio_to_fastest_peer_per_cpu_second": _ratio(least),
    }


def _ratio(rates: dict[str, float]) -> float | None:
    peers = [rate for name, rate in rates.items() if name != "elastane"]
    return round(rates["elastane"] / max(peers), 2) if peers else None


def _run(name: str, python: str, rows: Path, root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One run: seconds, processor seconds, peak memory, and what came out."""
    work = root / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    command = [
        python,
        str(REPOSITORY / "benchmarks" / "data_rate_run.py"),
        name,
        str(rows),
        str(root / "data" / "base"),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(work), "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = str(REPOSITORY) if name == "elastane" else ""
    with (
        (root / f"{name}.log").open("w") as log,
        subprocess.Popen(
            [*command, str(work), str(options.processes), str(options.max_length)],
            env=environment,
            cwd=work,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        watch = Watch(process.pid, every=0.2)
        begun = _event(process, "begin", root / f"{name}.log")
        cpu, start, before = watch.cpu_seconds(), time.monotonic(), len(watch.samples)
        _event(process, "end", root / f"{name}.log")
        seconds = time.monotonic() - start
        cpu = watch.cpu_seconds() - cpu
        watch.stop()
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        counted = _event(process, "counted", root / f"{name}.log")
    peak = max(watch.samples[before:], key=lambda sample: sample.resident)
    return {
        **{key: value for key, value in begun.items() if value},
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "tokens_per_second": round(counted["tokens"] / seconds),
        "tokens_per_second_per_core": round(counted["tokens"] / seconds / options.processes),
        "tokens_per_cpu_second": round(counted["tokens"] / cpu),
        "peak_memory_mib": round(peak.resident / MIB),
        "memory_before_mib": round(watch.samples[before - 1].resident / MIB),
        **counted,
    }


def _event(process: subprocess.Popen[str], wanted: str, log: Path) -> dict[str, Any]:
    """The next line of the program that says `wanted`; others, which libraries print, are passed over."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{") and (said := json.loads(line)).pop("event", "") == wanted:
            return dict(said)
    raise RuntimeError(f"ended before {wanted}: {log.read_text()[-2000:]}")


if __name__ == "__main__":
    main()
