"""Predictions beside measurements of this project's own trainer: random weights of true shapes.

Usage: python -m benchmarks.planner_gpu [--out FOLDER] [--limit SECONDS] [--unseen] [--compiled]
   or: python -m benchmarks.planner_gpu --again FILE: adds today's predictions (predicted_now) to an earlier result
   or: torchrun --nproc-per-node=N -m benchmarks.planner_gpu: the same as DDP (--sharded: FSDP2) over N GPUs
Every prediction is made, and written, before its plan is run.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, write
from tasks.contracts import HardwareProfile, Plan
from tasks.params import TrainParams, read_params
from tasks.planner.cost import CostModel
from tasks.planner.hardware_names import named_hardware
from tasks.planner.machine import machine
from tasks.planner.model_spec import model_spec
from tasks.planner.workload import Workload
from tasks.trainer.trial import TrialRequest, run_trial

SHAPES: dict[str, dict[str, Any]] = {
    "llama-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "llama-3b": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "llama-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "qwen-1.5b": {
        "model_type": "qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen-0.5b": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "mistral-7b": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "sliding_window": None,
    },
    "llama-13b": {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
        "vocab_size": 32000,
    },
}
# shape, method, precision, tokens a row, micro-batch, accumulation, checkpointing
VARIANTS = (
    ("llama-1b", "full", "bfloat16", 1024, 1, 4, "none"),
    ("llama-1b", "full", "bfloat16", 1024, 8, 2, "none"),
    ("llama-1b", "full", "bfloat16", 4096, 4, 1, "none"),
    ("llama-1b", "full", "bfloat16", 4096, 4, 1, "full"),
    ("llama-1b", "full", "float32", 1024, 4, 1, "none"),
    ("llama-1b", "lora", "bfloat16", 512, 2, 4, "none"),
    ("llama-1b", "lora", "bfloat16", 2048, 8, 1, "none"),
    ("llama-1b", "lora", "float32", 1024, 4, 1, "none"),
    ("llama-3b", "full", "bfloat16", 2048, 2, 2, "none"),
    ("llama-3b", "full", "bfloat16", 2048, 8, 1, "full"),
    ("llama-3b", "lora", "bfloat16", 2048, 4, 1, "none"),
    ("llama-3b", "lora", "float16", 1024, 8, 1, "full"),
    ("llama-8b", "lora", "bfloat16", 1024, 1, 2, "none"),
    ("llama-8b", "lora", "bfloat16", 1024, 4, 1, "none"),
    ("llama-8b", "lora", "bfloat16", 4096, 2, 1, "none"),
    ("llama-8b", "lora", "bfloat16", 4096, 4, 1, "full"),
    ("llama-8b", "lora", "bfloat16", 8192, 1, 1, "full"),
)

# Looked at only after the constants had been set by the variants above.
UNSEEN = (
    ("qwen-1.5b", "full", "bfloat16", 1536, 3, 2, "none"),
    ("qwen-1.5b", "full", "bfloat16", 768, 12, 1, "full"),
    ("qwen-1.5b", "lora", "bfloat16", 3072, 6, 1, "none"),
    ("qwen-1.5b", "lora", "float32", 768, 2, 2, "full"),
    ("mistral-7b", "lora", "bfloat16", 2560, 3, 1, "none"),
    ("mistral-7b", "lora", "float16", 512, 16, 1, "full"),
    ("mistral-7b", "lora", "bfloat16", 512, 1, 8, "none"),
    ("llama-13b", "lora", "bfloat16", 2048, 2, 1, "none"),
    ("llama-13b", "lora", "bfloat16", 4096, 2, 1, "full"),
    ("qwen-0.5b", "full", "bfloat16", 2048, 8, 1, "none"),
    ("qwen-0.5b", "full", "float16", 512, 4, 4, "none"),
)
NOT_RUN = {"failed": "not run: out of time"}


@dataclass(frozen=True)
class Layout:
    """What all variants of one result share: GPUs, FSDP2 instead of DDP over them, compiled layers."""

    ranks: int = 1
    sharded: bool = False
    compiled: bool = False

    @property
    def suffix(self) -> str:
        kind = "fsdp" if self.sharded else "ddp"
        return ("-compiled" if self.compiled else "") + (f"-{kind}{self.ranks}" if self.ranks > 1 else "")


def layout_of(name: str) -> Layout:
    """The layout that `Layout.suffix` gave a result's name."""
    found = re.search(r"-(ddp|fsdp)(\d+)$", name)
    ranks = int(found[2]) if found else 1
    return Layout(ranks, bool(found and found[1] == "fsdp"), "-compiled" in name)


def plan_of(micro: int, accumulation: int, level: str, layout: Layout = Layout()) -> Plan:
    ranks, sharded = layout.ranks, layout.sharded
    return Plan(
        engine="torch",
        device="cuda",
        backend="nccl",
        dp_replicate=1 if sharded else ranks,
        dp_shard=ranks if sharded else 1,
        sharding="fsdp2" if sharded else "none",
        tp=1,
        pp=1,
        schedule="none",
        micro_batch=micro,
        accumulation=accumulation,
        activation_checkpointing=level,  # type: ignore[arg-type]
        offload="none",
        compiled=layout.compiled,
    )


def predict(variant: tuple[Any, ...], hardware: HardwareProfile, layout: Layout) -> dict[str, Any]:
    """What the planner says of the variant: seconds and bytes by term."""
    shape, method, precision, length, micro, accumulation, level = variant
    spec = model_spec({"model_type": "llama", "max_position_embeddings": 8192, **SHAPES[shape]})
    work = Workload(method=method, precision=precision, sequence=length, mean_row=length)
    cost = CostModel(spec, work, machine(hardware, precision), 0.1, 1)
    estimate = cost.estimate(plan_of(micro, accumulation, level, layout))
    return {
        "seconds": estimate.total_seconds,
        "seconds_by_term": estimate.seconds,
        "bytes": estimate.total_bytes - estimate.memory_bytes["fixed"],
        "bytes_by_term": estimate.memory_bytes,
        "fits": cost.fits(estimate),
    }


def request_of(
    variant: tuple[Any, ...], folder: Path, train: TrainParams, steps: int, layout: Layout
) -> TrialRequest:
    shape, method, precision, length, micro, accumulation, level = variant
    config = folder / f"{shape}.json"
    config.write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 8192, **SHAPES[shape]}))
    return TrialRequest(
        config=str(config),
        plan=plan_of(micro, accumulation, level, layout),
        train=train.model_copy(update={"finetuning_type": method}),
        precision=precision,
        sequence=length,
        mean_row=length,
        steps=steps,
    )


def errors(rows: list[dict[str, Any]], which: str = "predicted") -> dict[str, float]:
    """Medians of absolute relative errors, in percent."""
    done = [row for row in rows if row.get("measured", {}).get("seconds")]
    if not done:
        return {}
    time_errors = [abs(row[which]["seconds"] / row["measured"]["seconds"] - 1) for row in done]
    memory_errors = [abs(row[which]["bytes"] / row["measured"]["peak_bytes"] - 1) for row in done]
    return {
        f"{which}_time_median_percent": round(100 * statistics.median(time_errors), 1),
        f"{which}_memory_median_percent": round(100 * statistics.median(memory_errors), 1),
        f"{which}_memory_worst_percent": round(100 * max(memory_errors), 1),
    }


def predict_again(path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    layout = layout_of(path.stem)
    hardware = named_hardware(f"{layout.ranks}xH200")
    for row in content["rows"]:
        row.setdefault("measured", NOT_RUN)
        row["predicted_now"] = predict(tuple(row["variant"]), hardware, layout)
    content |= errors(content["rows"]) | errors(content["rows"], "predicted_now")
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--limit", type=float, default=480, help="no new variant after so many seconds")
    parser.add_argument("--sharded", action="store_true", help="over several GPUs FSDP2 instead of DDP")
    parser.add_argument("--compiled", action="store_true", help="with decoder layers compiled")
    parser.add_argument("--unseen", action="store_true", help="the variants that no constant was set by")
    parser.add_argument(
        "--again", type=Path, help="adds today's predictions to this earlier result; runs nothing"
    )
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    if options.again:
        predict_again(options.again)
        return
    import torch

    from tasks.probe_hardware import read_machine

    hardware = read_machine("cuda", {}, Path("/"))
    train = read_params(Path(__file__).parents[1] / "params.yaml").train
    variants = UNSEEN if options.unseen else VARIANTS
    layout = Layout(int(os.environ.get("WORLD_SIZE", "1")), options.sharded, options.compiled)
    name = "planner-gpu" + ("-unseen" if options.unseen else "") + layout.suffix
    rows = [
        {"variant": list(variant), "predicted": predict(variant, hardware, layout)} for variant in variants
    ]
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.backends.cuda.matmul.allow_tf32 = False
    if layout.ranks > 1:
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
    if os.environ.get("RANK", "0") != "0":
        options.out = Path(tempfile.mkdtemp())  # every rank trains, the first reports
    write(name, {"rows": rows, "measured": False}, options.out)
    measure(rows, train, options, name, layout)
    if layout.ranks > 1:
        torch.distributed.destroy_process_group()


def measure(
    rows: list[dict[str, Any]], train: TrainParams, options: argparse.Namespace, name: str, layout: Layout
) -> None:
    import torch

    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for row in rows:
            if time.monotonic() - begin > options.limit:
                row["measured"] = NOT_RUN
                continue
            request = request_of(tuple(row["variant"]), Path(folder), train, options.steps, layout)
            row["measured"] = run_trial(request).model_dump(exclude={"plan"})
            print(row["variant"], row["predicted"]["seconds"], row["measured"], flush=True)
            gc.collect()
            torch._dynamo.reset()
            torch.cuda.empty_cache()
            write(name, {"rows": rows, "measured": True, **errors(rows)}, options.out)
    write(name, {"rows": rows, "measured": True, **errors(rows)}, options.out)


if __name__ == "__main__":
    main()
