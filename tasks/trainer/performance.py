"""How fast a run is, where each rank's time goes, and how near that is to what the hardware could do."""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from tasks.contracts import (
    FinetuningType,
    HardwareProfile,
    ModelSpec,
    Plan,
    PlanReport,
    Precision,
    Predicted,
    RankPerformance,
    TrainPerformance,
)
from tasks.contracts.training import SHARES
from tasks.errors import UserError
from tasks.paths import Paths
from tasks.planner.compute import model_flops
from tasks.planner.gpus import gpu_type
from tasks.planner.machine import machine
from tasks.planner.model_spec import model_spec
from tasks.planner.workload import Workload
from tasks.trainer.bottleneck import bottleneck
from tasks.trainer.clock import KINDS, QUEUED

if TYPE_CHECKING:
    from tasks.trainer.loop import Job
    from tasks.trainer.run_state import StepRecord

GPU_SAMPLE_SECONDS = 0.5


def own_gpus(plan: Plan) -> Sequence[int]:
    """Those that this process drives."""
    return range(plan.dp_replicate) if plan.replication == "data_parallel" else (torch.cuda.current_device(),)


class GpuWatch:
    """Samples this rank's GPU utilisation (percent, as NVML states it) in a thread."""

    def __init__(self, plan: Plan) -> None:
        self._samples: list[float] = []
        self._done = threading.Event()
        if plan.device == "cuda":
            threading.Thread(target=self._watch, args=(own_gpus(plan),), daemon=True).start()

    def _watch(self, gpus: Sequence[int]) -> None:
        import pynvml

        with suppress(pynvml.NVMLError, ModuleNotFoundError):
            while not self._done.wait(GPU_SAMPLE_SECONDS):
                self._samples.append(sum(float(torch.cuda.utilization(gpu)) for gpu in gpus) / len(gpus))

    def mean(self) -> float | None:
        self._done.set()
        return sum(self._samples) / len(self._samples) if self._samples else None


class Stopwatch:
    """This start on this rank: steps, wall time, and how much of it went to waiting for data and to checkpoints."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.data_wait = 0.0
        self.checkpoint = 0.0
        self.steps = 0

    def wall(self) -> float:
        return time.perf_counter() - self.start

    def spent(self, clock: Mapping[str, float]) -> dict[str, float]:
        """Seconds since the start by kind, with what the engine's clock counts; `wall` is all of it."""
        own = {"data_wait": self.data_wait, "checkpoint": self.checkpoint, "wall": self.wall()}
        return own | {kind: clock[kind] for kind in (*KINDS, QUEUED)}


def shares(spent: Mapping[str, float]) -> dict[str, float]:
    """Shares of wall time by kind (sum 1) from what `Stopwatch.spent` gives; what is of no kind is idle."""
    wall = max(spent["wall"], 1e-9)
    busy = {name: spent[name] / wall for name in SHARES if name != "idle"}
    # Clocks of host and device may differ by a hair.
    excess = max(1.0, sum(busy.values()))
    busy = {name: value / excess for name, value in busy.items()}
    return busy | {"idle": max(0.0, 1.0 - sum(busy.values()))}


def peak_memory(plan: Plan) -> int:
    """Bytes: the most the CUDA allocator reserved (of one GPU, if this process drives several), or on a CPU the most
    this process had resident.
    """
    if plan.device == "cuda":
        return max(int(torch.cuda.max_memory_reserved(gpu)) for gpu in own_gpus(plan))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def rank_performance(
    rank: int, plan: Plan, watch: Stopwatch, clock: Mapping[str, float], utilisation: float | None
) -> RankPerformance:
    """Where this rank's time went since its first step."""
    spent = watch.spent(clock)
    stepping = max(sum(spent[kind] for kind in KINDS), 1e-9)
    return RankPerformance(
        rank=rank,
        steps=watch.steps,
        **shares(spent),
        queued=spent[QUEUED] / stepping if plan.device == "cuda" else None,
        gpu_utilisation_percent=utilisation,
        peak_memory_bytes=peak_memory(plan),
        peak_memory_kind="cuda_reserved" if plan.device == "cuda" else "process_rss",
    )


# --- beside what the hardware could do ------------------------------------------------------------


class Yardstick:
    """Model FLOPs of rows, and the data sheets' FLOP/s of all GPUs of a plan, as in the planner's `mfu`.

    `attended`: tokens of the document that an average token is in, where rows are packs of them.
    """

    def __init__(
        self,
        paths: Paths,
        hardware: HardwareProfile,
        plan: Plan,
        precision: Precision,
        method: FinetuningType,
        attended: float | None = None,
    ) -> None:
        self._peak = _peak(hardware, plan, precision)
        self._precision, self._method, self._attended = precision, method, attended
        self._spec = _spec(paths)
        self._known: dict[int, float] = {}

    def flops(self, rows: Iterable[int]) -> float:
        """Model FLOPs of rows of so many tokens; 0 for a family that the planner does not know."""
        return sum(self._known.get(tokens) or self._row(tokens) for tokens in rows)

    def _row(self, tokens: int) -> float:
        if self._spec is None:
            return 0.0
        work = Workload(self._method, self._precision, tokens, float(tokens), attended=self._attended)
        return self._known.setdefault(tokens, model_flops(self._spec, work))

    def mfu(self, flops: float, seconds: float) -> float | None:
        """The share of the peak; None where the model's FLOPs or the peak are not known."""
        if not flops or self._peak is None:
            return None
        return flops / seconds / self._peak


def _spec(paths: Paths) -> ModelSpec | None:
    try:
        return model_spec(json.loads((paths.base / "config.json").read_text(encoding="utf-8")))
    except UserError:  # the family is not one of the planner's, yet it was to be trained
        return None


def _peak(hardware: HardwareProfile, plan: Plan, precision: Precision) -> float | None:
    """FLOP/s of the plan's GPUs, the slowest counting for all; a CPU and an unknown card have no data sheet."""
    if plan.device == "cpu" or precision == "float64":
        return None
    if not all(gpu_type(gpu.name, gpu.compute_capability)[1] for gpu in hardware.gpus):
        return None
    return machine(hardware, precision).peak * plan.world_size


def predicted(paths: Paths, plan: Plan) -> Predicted | None:
    """The planner's estimate in plan.json, if it is of this plan."""
    if not paths.plan.is_file():
        return None
    chosen = PlanReport.read(paths.plan).chosen
    if chosen.plan != plan or chosen.estimate is None:
        return None
    return Predicted(
        tokens_per_second=chosen.estimate.tokens_per_second,
        mfu=chosen.estimate.mfu,
        peak_memory_bytes=max(chosen.estimate.total_bytes, chosen.estimate.save_bytes),
    )


def train_performance(
    job: Job, paths: Paths, ranks: Sequence[RankPerformance], records: Sequence[StepRecord], starts: int
) -> TrainPerformance:
    """The report of a finished run. Speeds are of the steps of this start, since others may have had another plan."""
    hardware = HardwareProfile.read(paths.hardware)
    if job.plan.device == "cuda":
        limit = min(gpu.memory_bytes for gpu in hardware.gpus)
    else:
        limit = hardware.host_memory_bytes
    timed = records[len(records) - ranks[0].steps :]
    seconds = sum(record.seconds for record in timed)
    method = job.train.finetuning_type
    yardstick = Yardstick(paths, hardware, job.plan, job.precision, method, job.attended)
    lengths = job.split.lengths()
    flops = yardstick.flops(int(lengths[row]) for record in timed for row in record.samples)
    mfu = yardstick.mfu(flops, seconds)
    found = bottleneck(ranks, job.plan, limit, mfu)
    return TrainPerformance(
        run_key=job.run_key,
        plan=job.plan,
        hardware=hardware.identity,
        steps_timed=len(timed),
        tokens_per_second=sum(record.tokens for record in timed) / seconds if timed else 0.0,
        seconds_per_step=seconds / len(timed) if timed else 0.0,
        train_seconds=sum(record.seconds for record in records),
        starts=starts,
        ranks=tuple(ranks),
        bottleneck=found.name,
        advice=found.advice,
        mfu=mfu,
        predicted=predicted(paths, job.plan),
    )
