"""The first pipeline on real GPUs: the commands a user types, on a random Llama of 0.8 B parameters.

Usage: python -m benchmarks.first_light_gpu --out FOLDER [--pinned]
Runs `elastane run` (LoRA, all `auto`), then the stages for full tuning, float16 and float32, and with
--pinned also one GPU's run of the same float32 recipe, to compare loss curves between plans.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.record import write

STAGES = ("prepare_data", "probe_hardware", "select_strategy", "train", "evaluate")
LIMIT_SECONDS = 240
BASE = {
    "prepare_data.source": "data/raw/rows.json",
    "prepare_data.max_length": 1024,
    "prepare_data.validation_fraction": 0.05,
    "train.global_batch": 64,
    "train.learning_rate": 0.0003,
    "evaluate.max_rows": 64,
    "evaluate.samples": 1,
    "evaluate.max_new_tokens": 16,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {"train.finetuning_type": "full", "train.learning_rate": 0.00003},
    "lora-float16": {"train.precision": "float16"},
    "lora-float32": {"train.precision": "float32", "train.token_budget": 400_000},
}


def make_model(folder: Path) -> None:
    """A random Llama, 0.8 B parameters, with a byte tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.tiny import write_tokenizer

    config = LlamaConfig(
        vocab_size=259,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=18,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    folder.mkdir(parents=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)


def make_rows(file: Path, rows: int) -> None:
    draw = random.Random(0)
    words = [
        f"{draw.choice('bcdfgklmnprst')}{draw.choice('aeiou')}{draw.choice('klmnrst')}" for _ in range(200)
    ]
    content = []
    for number in range(rows):
        said = " ".join(draw.choices(words, k=draw.randint(40, 110)))
        content.append({"instruction": f"Repeat number {number}: {said}", "output": said})
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content), encoding="utf-8")


def make_workspace(root: Path, model: Path, changes: dict[str, Any], rows: int) -> None:
    from tests.tiny import REPOSITORY, write_params

    shutil.copytree(REPOSITORY, root, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "tests", "docs"))
    make_rows(root / "data" / "raw" / "rows.json", rows)
    write_params(root, **{**BASE, "model.name_or_path": str(model), **changes})
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    subprocess.run(["git", "add", "-A"], cwd=root, check=True)
    subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "s"], cwd=root, check=True
    )


def environment(root: Path) -> dict[str, str]:
    binaries = Path(sys.executable).parent
    path = f"{binaries}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def run_variant(root: Path, whole: bool) -> dict[str, Any]:
    """Runs the pipeline (`elastane run`) or its stages one by one; figures from the reports."""
    begin = time.monotonic()
    commands = (
        [[sys.executable, "-m", "flows.cli", "run", "--json"]]
        if whole
        else [[sys.executable, "-m", f"tasks.{stage}"] for stage in STAGES]
    )
    for command in commands:
        with (root / "log").open("a") as log:
            done = subprocess.run(
                command,
                cwd=root,
                env=environment(root),
                stdout=log,
                stderr=log,
                timeout=LIMIT_SECONDS,
                check=False,
            )
        if done.returncode:
            tail = (root / "log").read_text(errors="replace")[-3000:]
            return {"failed": f"{command[-1]} ended with {done.returncode}", "log": tail}
    return {"seconds": round(time.monotonic() - begin, 1), **figures(root)}


def figures(root: Path) -> dict[str, Any]:
    reports = {path.stem: json.loads(path.read_text()) for path in (root / "reports").glob("*.json")}
    plan, speed = reports["plan"]["chosen"], reports["train_performance"]
    with (root / "reports" / "train_curves.csv").open() as file:
        curve = [float(row["loss"]) for row in csv.DictReader(file)]
    return {
        "plan": plan["plan"],
        "why": reports["plan"]["why"],
        "precision": reports["train_report"]["precision"],
        "predicted_tokens_per_second": round(plan["estimate"]["tokens_per_second"]),
        "predicted_gib": round(sum(plan["estimate"]["memory_bytes"].values()) / 2**30, 2),
        "tokens_per_second": round(speed["tokens_per_second"]),
        "ranks": speed["ranks"],
        "advice": speed["advice"],
        "steps": len(curve),
        "tokens": reports["train_report"]["tokens"],
        "seconds_per_step": speed["seconds_per_step"],
        "first_loss": curve[0],
        "last_loss": curve[-1],
        "curve": curve,
        "eval": {
            "base": reports["eval_report"]["base"]["loss"],
            "tuned": reports["eval_report"]["tuned"]["loss"],
        },
        "registration": reports.get("registration", {}).get("reason"),
        "hardware": reports["hardware"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument(
        "--pinned", action="store_true", help="also the float32 recipe on one GPU, to compare plans"
    )
    parser.add_argument("--variants", default="lora,full,lora-float16,lora-float32")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="first-light-") as work:
        found = measure(Path(work), options)
    path = write("first-light-gpu", {"variants": found}, options.out)
    print(
        json.dumps(
            {
                k: {x: y for x, y in v.items() if x != "curve"} if isinstance(v, dict) else v
                for k, v in found.items()
            },
            indent=1,
        )
    )
    print(path)


def measure(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Figures by variant; those so far are written after each, since a rented GPU may go."""
    wanted = options.variants.split(",")
    make_model(work / "model")
    found: dict[str, Any] = {}
    for name, changes in {"lora": {}, **VARIANTS}.items():
        if name not in wanted:
            continue
        make_workspace(work / name, work / "model", changes, options.rows)
        found[name] = run_variant(work / name, whole=name == "lora")
        write("first-light-gpu", {"variants": found}, options.out)
    if options.pinned:
        changes = {**VARIANTS["lora-float32"], "select_strategy.data_parallel_degree": 1}
        make_workspace(work / "pinned", work / "model", changes, options.rows)
        found["lora-float32-single"] = run_variant(work / "pinned", whole=False)
        pairs = zip(found["lora-float32"]["curve"], found["lora-float32-single"]["curve"], strict=True)
        found["largest_relative_loss_difference"] = max(abs(a - b) / abs(b) for a, b in pairs)
    return found


if __name__ == "__main__":
    main()
