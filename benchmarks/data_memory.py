"""Memory of data preparation over a run with millions of rows: short completions of 32 to 64 tokens, all different.

The curve is plotted to docs/images/data-memory.png. Needs about 1.5 KB of disk a row.

Usage: python -m benchmarks.data_memory [--rows 10000000]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.process_tree import MIB, Sample, Watch
from benchmarks.record import write
from tasks.contracts import DataManifest
from tasks.data.docstrings import docstring_rows
from tasks.params import ModelParams
from tasks.paths import Paths
from tasks.trainer.base_model import ensure_base

REPOSITORY = Path(__file__).parents[1]
PLOT = REPOSITORY / "docs" / "images" / "data-memory.png"
BUILTIN = "smollm2-135m-instruct"
PROMPT_WORDS, ANSWER_WORDS = (8, 14), (12, 22)  # about 32 to 64 tokens together
POINTS = 400  # of the curve, in the JSON


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--name", default="data-memory")
    parser.add_argument("--plot", type=Path, default=PLOT)
    parser.add_argument("--folder", type=Path, help="where the temporary files go")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        root = Path(temporary)
        _write_rows(root / "data" / "raw" / "rows.jsonl", options.rows)
        ensure_base(ModelParams(name_or_path=BUILTIN, revision=None, trust_remote_code=False), Paths(root))
        _write_params(root)
        figures, samples = _run(root)
    _plot(samples, options.rows, options.plot)
    write(options.name, {"rows": options.rows, **figures, "curve": _curve(samples)})


def _write_rows(path: Path, rows: int) -> None:
    """Prompts and completions of words drawn as often as the built-in texts have them."""
    words = [word for row in docstring_rows() for _, text in row.messages for word in text.split(" ")]
    draw = random.Random(0)
    path.parent.mkdir(parents=True)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            prompt = " ".join(draw.choices(words, k=draw.randint(*PROMPT_WORDS)))
            answer = " " + " ".join(draw.choices(words, k=draw.randint(*ANSWER_WORDS)))
            file.write(json.dumps({"prompt": prompt, "completion": answer}) + "\n")


def _write_params(root: Path) -> None:
    from ruamel.yaml import YAML

    yaml = YAML(typ="safe")
    raw: dict[str, Any] = yaml.load((REPOSITORY / "params.yaml").read_text(encoding="utf-8"))
    raw["prepare_data"] |= {"source": "data/raw/rows.jsonl", "on_bad_row": "reject"}
    with (root / "params.yaml").open("w", encoding="utf-8") as file:
        yaml.dump(raw, file)


def _run(root: Path) -> tuple[dict[str, Any], list[Sample]]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""}
    start = time.monotonic()
    with subprocess.Popen([sys.executable, "-m", "tasks.prepare_data"], cwd=root, env=environment) as process:
        watch = Watch(process.pid, every=1.0)
        process.wait()
        cpu = watch.cpu_seconds()
        watch.stop()
    seconds = time.monotonic() - start
    if process.returncode:
        raise RuntimeError(f"prepare_data ended with {process.returncode}")
    manifest = DataManifest.read(Paths(root).manifest)
    tokens = manifest.train.tokens + manifest.validation.tokens
    samples = [sample for sample in watch.samples if sample.processes]
    third = len(samples) // 3
    peaks = [max(sample.anonymous for sample in samples[part * third :][:third]) for part in range(3)]
    return {
        "bytes": (root / "data" / "raw" / "rows.jsonl").stat().st_size,
        "cores": len(os.sched_getaffinity(0)),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "rows_per_second": round(manifest.rows_in / seconds),
        "tokens_per_second_per_core": round(tokens / seconds / len(os.sched_getaffinity(0))),
        "peak_memory_mib": round(max(sample.resident for sample in samples) / MIB),
        "peak_anonymous_mib": round(max(sample.anonymous for sample in samples) / MIB),
        "peak_anonymous_mib_of_each_third": [round(peak / MIB) for peak in peaks],
        "manifest": json.loads(manifest.to_json()),
    }, samples


def _curve(samples: list[Sample]) -> list[tuple[float, int, int, int]]:
    """(seconds, resident MiB, anonymous MiB, processes), thinned."""
    every = max(1, len(samples) // POINTS)
    return [
        (round(one.seconds, 1), round(one.resident / MIB), round(one.anonymous / MIB), one.processes)
        for one in samples[::every]
    ]


def _plot(samples: list[Sample], rows: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.2))
    seconds = [one.seconds for one in samples]
    axes.plot(seconds, [one.resident / MIB for one in samples], label="all processes (shared pages once)")
    axes.plot(seconds, [one.anonymous / MIB for one in samples], label="of it, not backed by a file")
    axes.set(xlabel="seconds", ylabel="MiB", ylim=(0, None), title=f"Preparing {rows:,} rows")
    axes.legend(loc="lower right")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
