"""How fast a run is, where each rank's time goes, and one sentence of advice."""

from __future__ import annotations

import resource
import sys
import threading
import time
from contextlib import suppress

import torch

from tasks.contracts import Plan, RankPerformance

GPU_SAMPLE_SECONDS = 0.5


class GpuWatch:
    """Samples this rank's GPU utilisation (percent, as NVML states it) in a thread."""

    def __init__(self, plan: Plan) -> None:
        self._samples: list[float] = []
        self._done = threading.Event()
        if plan.device == "cuda":
            threading.Thread(target=self._watch, args=(torch.cuda.current_device(),), daemon=True).start()

    def _watch(self, index: int) -> None:
        import pynvml

        with suppress(pynvml.NVMLError, ModuleNotFoundError):
            while not self._done.wait(GPU_SAMPLE_SECONDS):
                self._samples.append(float(torch.cuda.utilization(index)))

    def mean(self) -> float | None:
        self._done.set()
        return sum(self._samples) / len(self._samples) if self._samples else None


class Stopwatch:
    """Wall time of this start, and how much of it the rank waited for data."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.data_wait = 0.0
        self.tokens = 0

    def count(self, tokens: int) -> None:
        self.tokens += tokens

    def wall(self) -> float:
        return time.perf_counter() - self.start


def peak_memory(plan: Plan) -> int:
    """Bytes: the most the CUDA allocator reserved, or on a CPU the most this process had resident."""
    if plan.device == "cuda":
        return int(torch.cuda.max_memory_reserved())
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def rank_performance(
    rank: int, plan: Plan, watch: Stopwatch, clock: dict[str, float], utilisation: float | None
) -> RankPerformance:
    """Shares of wall time since the first step; what is neither of three is idle (saving, logging, host)."""
    wall = max(watch.wall(), 1e-9)
    shares = {
        "data_wait": watch.data_wait / wall,
        "compute": clock["compute"] / wall,
        "communication": clock["communication"] / wall,
    }
    excess = max(1.0, sum(shares.values()))
    shares = {name: value / excess for name, value in shares.items()}
    return RankPerformance(
        rank=rank,
        **shares,
        idle=max(0.0, 1.0 - sum(shares.values())),
        gpu_utilisation_percent=utilisation,
        peak_memory_bytes=peak_memory(plan),
        peak_memory_kind="cuda_reserved" if plan.device == "cuda" else "process_rss",
    )


def advise(ranks: list[RankPerformance], plan: Plan, memory_limit_bytes: int) -> str:
    """One sentence: the largest loss of time and what to do about it."""
    worst_wait = max(rank.data_wait for rank in ranks)
    worst_talk = max(rank.communication for rank in ranks)
    slowest_talk = min(rank.communication for rank in ranks)
    worst_idle = max(rank.idle for rank in ranks)
    used = max(rank.peak_memory_bytes for rank in ranks) / memory_limit_bytes
    if worst_wait > 0.1:
        return (
            f"The ranks wait for data {worst_wait:.0%} of the time; put the prepared data on a faster disk."
        )
    if worst_talk - slowest_talk > 0.1:
        return (
            f"One rank waits {worst_talk:.0%} of the time for a slower one; "
            "look for another program or a hotter card on the slow device."
        )
    if worst_talk > 0.15:
        return (
            f"Gradient exchange takes {worst_talk:.0%} of the time; a larger train.global_batch exchanges less often "
            "(and changes what is learned), a faster link changes nothing else."
        )
    if worst_idle > 0.2:
        return (
            f"{worst_idle:.0%} of the time goes to saving, logging and the host; "
            "raise train.checkpoint_every_seconds or look at the disk."
        )
    if plan.device == "cpu":
        return "Computing takes nearly all of the time; a GPU is the only large gain left."
    if used < 0.5 and plan.micro_batch * plan.data_parallel < plan.global_batch:
        return (
            f"Only {used:.0%} of the device memory is used; a larger per_device_train_batch_size may be faster "
            "and changes nothing in the result."
        )
    return "Computing takes nearly all of the time; more or faster GPUs are the only large gain left."
