"""Host memory and seconds that loading a base model takes over all ranks of a plan, on gloo ranks of this machine.

A random llama checkpoint is written in several files, of float32 and of bfloat16; both are held in float32, as masters
are. Each plan loads it twice: read box by box, as a run does, and loaded whole by every rank and cut then, as for a
model whose files cannot be read so.

Counted is memory that belongs to the ranks: the sum of their Pss_Anon and Pss_Shmem in /proc/<pid>/smaps_rollup,
sampled from outside, less what it was just before loading (with a tiny model loaded first, so that modules and groups
are there). Pages of the mapped files are Pss_File and not counted: the system's cache has them once, and may drop them.
So float32 files that are loaded whole hide: transformers uses the mapped pages themselves where no type is changed.

Usage: python -m benchmarks.loading_memory [--parameters 500]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import shutil
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import write
from tasks.contracts import Plan
from tasks.params import read_params
from tasks.paths import Paths
from tests import tiny
from tests.distributed.ranks import run_ranks

TARGET = 1.3  # times the weights as they are held, over all ranks
PAUSE = 0.003  # between two samples
BOXES = "box by box"
MICRO = (1, 1, 1)
PLANS = {
    "single": tiny.cpu_plan(*MICRO),
    "fsdp2": tiny.cpu_plan(*MICRO, shards=2),
    "tp2": tiny.cpu_plan(*MICRO, tp=2),
    "pp2": tiny.cpu_plan(*MICRO, pp=2, schedule="1f1b"),
    "fsdp4": tiny.cpu_plan(*MICRO, shards=4),
    "tp2pp2": tiny.cpu_plan(*MICRO, tp=2, pp=2, schedule="1f1b"),
}


@dataclass(frozen=True)
class Measured:
    """Bytes over all ranks above those before loading, at the peak and in the end; seconds of the slowest rank, and
    of processors over all ranks.
    """

    peak: int
    held: int
    seconds: float
    processor: float


def workspace(root: Path, stored: torch.dtype, parameters: float = 0.5, files: int = 2) -> int:
    """A base of about so many million parameters in several files of that type; its bytes in float32."""
    from transformers import AutoConfig

    from tasks.trainer.base_model import ensure_base
    from tasks.trainer.legacy.checkpoint import Writer
    from tasks.trainer.loading import meta_model
    from tasks.trainer.weights import RandomWeights

    hidden = max(128, round((parameters * 1e6 / 210) ** 0.5 / 128) * 128)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=21 * hidden,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=16 if parameters > 1 else 2,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        tie_word_embeddings=False,
        pad_token_id=None,
    )
    folder = root / "model"
    config.save_pretrained(folder)
    tiny.write_tokenizer(folder)
    model = meta_model(config, stored)
    weights = RandomWeights(model, 0)
    writer = Writer(folder, sum(weight.nbytes for weight in model.parameters()) // files)
    for name, weight in model.named_parameters():
        numbers = torch.empty(weight.shape, dtype=stored)
        weights.read(name, (0,) * weight.dim(), numbers)
        writer.add(name, numbers)
    writer.finish()
    tiny.write_params(root, **{"model.name_or_path": str(folder), "train.lora.rank": 8})
    ensure_base(read_params(root / "params.yaml").model, Paths(root))
    return sum(weight.numel() for weight in model.parameters()) * torch.float32.itemsize


def measure(root: Path, warm_up: Path, plan: Plan, whole: bool) -> Measured:
    """Loads the workspace's base under a plan, after that of `warm_up`."""
    with tempfile.TemporaryDirectory() as temporary:
        watch = _Watch(Path(temporary), plan.world_size)
        watch.start()
        try:
            run_ranks(plan.world_size, _load, str(root), str(warm_up), plan, whole, temporary)
        finally:
            watch.over.set()
            watch.join()
    walls, processors = zip(*watch.seconds, strict=True)
    return Measured(watch.peak - watch.before, watch.held - watch.before, max(walls), sum(processors))


def _load(root: str, warm_up: str, plan: Plan, whole: bool, meeting: str) -> None:
    """One rank: a tiny model, then, once it is told to, the real one, which it holds until it is told to end."""
    import torch.distributed as dist

    rank, folder = os.environ["RANK"], Path(meeting)
    dist.init_process_group("gloo")
    _stages(warm_up, plan, whole)
    gc.collect()
    (folder / f"ready-{rank}").write_text(str(os.getpid()))
    _until(folder / "go")
    begin = time.perf_counter(), time.process_time()
    held = _stages(root, plan, whole)
    took = time.perf_counter() - begin[0], time.process_time() - begin[1]
    (folder / f"loaded-{rank}.part").write_text(json.dumps(took))
    (folder / f"loaded-{rank}.part").rename(folder / f"loaded-{rank}")
    _until(folder / "end")
    assert all(not weight.is_meta for stage in held for weight in stage.parameters())
    dist.destroy_process_group()


def _stages(root: str, plan: Plan, whole: bool) -> Any:
    from tasks.trainer.loading import load_base, open_base
    from tasks.trainer.parallelize import parallelize
    from tasks.trainer.weights import meta_of

    params, paths = read_params(Path(root) / "params.yaml"), Paths(Path(root))
    base = meta_of(load_base(paths, torch.float32)) if whole else open_base(paths, torch.float32)
    return parallelize(base, params.train, plan, "float32", params.seed).modules


def _until(file: Path) -> None:
    while not file.exists():
        time.sleep(PAUSE)


class _Watch(threading.Thread):
    """Lets the ranks begin together and samples what they hold until all have loaded."""

    def __init__(self, folder: Path, ranks: int) -> None:
        super().__init__(daemon=True)
        self.folder, self.ranks, self.over = folder, ranks, threading.Event()
        self.before = self.peak = self.held = 0
        self.seconds: list[tuple[float, float]] = []

    def run(self) -> None:
        if not self._all("ready"):
            return
        ranks = [int(file.read_text()) for file in self.folder.glob("ready-*")]
        self.before = self.peak = owned(ranks)
        (self.folder / "go").touch()
        while not self.over.is_set() and len(list(self.folder.glob("loaded-?"))) < self.ranks:
            self.peak = max(self.peak, owned(ranks))
            time.sleep(PAUSE)
        if not self.over.is_set():
            self.held = owned(ranks)
            self.peak = max(self.peak, self.held)
            self.seconds = [json.loads(file.read_text()) for file in self.folder.glob("loaded-?")]
        (self.folder / "end").touch()

    def _all(self, what: str) -> bool:
        while not self.over.wait(PAUSE):
            files = list(self.folder.glob(f"{what}-?"))
            if len(files) == self.ranks and all(file.stat().st_size for file in files):
                return True
        return False


def owned(processes: list[int]) -> int:
    """Bytes that belong to these processes and are no pages of a file; what some share counts once."""
    total = 0
    for process in processes:
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("Pss_Anon", "Pss_Shmem"):
                total += 1024 * int(value.split()[0])
    return total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=500, help="millions")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["ELASTANE_CACHE"] = str(Path(temporary) / "cache")
        warm_up = Path(temporary) / "tiny"
        workspace(warm_up, torch.bfloat16)
        for stored in (torch.float32, torch.bfloat16):
            root = Path(temporary) / str(stored)
            size = workspace(root, stored, options.parameters, 8)
            for name, whole in itertools.product(PLANS, (False, True)):
                rows.append(_row(name, stored, whole, measure(root, warm_up, PLANS[name], whole), size))
                print(json.dumps(rows[-1]), flush=True)
            shutil.rmtree(root)
    boxes = [row for row in rows if row["read"] == BOXES]
    write(
        "loading-memory",
        {
            "weights_bytes": size,
            "counted": "sum over ranks of Pss_Anon + Pss_Shmem above what it was before loading",
            "target": TARGET,
            "target_met": all(row["peak_over_weights"] <= TARGET for row in boxes),
            "rows": rows,
        },
    )


def _row(plan: str, stored: torch.dtype, whole: bool, got: Measured, size: int) -> dict[str, Any]:
    return {
        "plan": plan,
        "ranks": PLANS[plan].world_size,
        "files": str(stored).removeprefix("torch."),
        "read": "whole by every rank" if whole else BOXES,
        "peak_over_weights": round(got.peak / size, 3),
        "held_over_weights": round(got.held / size, 3),
        "seconds": round(got.seconds, 2),
        "processor_seconds": round(got.processor, 2),
    }


if __name__ == "__main__":
    main()
