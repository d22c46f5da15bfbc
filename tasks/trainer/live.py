"""Figures of a run while it runs: speed, MFU, memory and where the time goes, for the bar and for MLflow.

Ranks do not talk about it. Each writes its figures to a file of its own every few seconds, and rank 0 reads those of
its node; ranks of other nodes are in the report at the end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from pydantic import ValidationError

from tasks.contracts import Contract, Plan
from tasks.contracts.training import SHARES
from tasks.trainer.engine import Engine
from tasks.trainer.performance import Stopwatch, Yardstick, peak_memory, shares

WRITE_SECONDS = 5.0
METRIC_SECONDS = 15.0
RECENT_SECONDS = 30.0  # speeds are of so many last seconds
WORTH_A_WORD = 0.1  # of the time; from there on a loss stands in the bar
WORDS = {
    "data_wait": "waiting for data",
    "communication": "communication",
    "pipeline_wait": "pipeline waits",
    "checkpoint": "saving",
    "idle": "idle",
}


class LiveRank(Contract):
    """runs/<RunKey>/ranks/<rank>.json: shares of the time since the file before, memory so far, in bytes."""

    rank: int
    step: int
    written: float
    shares: dict[str, float]
    peak_memory_bytes: int
    gpu_utilisation_percent: float | None


class Reporter:
    """Writes one rank's figures; called after every step, it does something every few seconds."""

    def __init__(self, run: Path, rank: int, plan: Plan, engine: Engine, watch: Stopwatch) -> None:
        self._path = run / "ranks" / f"{rank}.json"
        self._rank, self._plan, self._engine, self._watch = rank, plan, engine, watch
        self._before = dict.fromkeys(watch.spent(engine.clock()), 0.0)
        self._due = time.monotonic() + WRITE_SECONDS

    def step(self, number: int) -> bool:
        """Whether it was time to write."""
        if time.monotonic() < self._due:
            return False
        spent = self._watch.spent(self._engine.clock())
        since = {name: value - self._before[name] for name, value in spent.items()}
        self._before = spent
        live = LiveRank(
            rank=self._rank,
            step=number,
            written=time.time(),
            shares=shares(since),
            peak_memory_bytes=peak_memory(self._plan),
            gpu_utilisation_percent=_utilisation(self._plan),
        )
        self._path.parent.mkdir(exist_ok=True)
        fresh = self._path.with_name(f".{self._path.name}")
        fresh.write_text(live.to_json(), encoding="utf-8")  # no fsync: only the living read it
        fresh.replace(self._path)
        self._due = time.monotonic() + WRITE_SECONDS
        return True


def _utilisation(plan: Plan) -> float | None:
    """Percent of the last moments in which some kernel ran, as NVML states it; None where it does not."""
    if plan.device == "cpu":
        return None
    import pynvml

    with suppress(pynvml.NVMLError, ModuleNotFoundError):
        return float(torch.cuda.utilization())
    return None


class Board:
    """What rank 0 shows and logs."""

    def __init__(self, run: Path, plan: Plan, yardstick: Yardstick) -> None:
        self._folder, self._plan, self._yardstick = run / "ranks", plan, yardstick
        self._steps: deque[tuple[float, int, float]] = deque()  # of each step: seconds, tokens, model FLOPs
        self._began = time.time()
        self._ranks: list[LiveRank] = []
        self._logged = 0.0

    def step(self, rows: Sequence[int], seconds: float) -> None:
        """Counts a step of rows of so many tokens."""
        self._steps.append((seconds, sum(rows), self._yardstick.flops(rows)))
        while len(self._steps) > 1 and self._recent[0] - self._steps[0][0] >= RECENT_SECONDS:
            self._steps.popleft()

    @property
    def _recent(self) -> tuple[float, int, float]:
        seconds, tokens, flops = zip(*self._steps, strict=True)
        return sum(seconds), sum(tokens), sum(flops)

    @property
    def rate(self) -> float:
        """Tokens a second, lately."""
        seconds, tokens, _ = self._recent
        return tokens / seconds

    @property
    def mfu(self) -> float | None:
        seconds, _, flops = self._recent
        return self._yardstick.mfu(flops, seconds)

    def read(self) -> None:
        """Takes up what the ranks of this node have written since this start."""
        found = []
        for rank in range(self._plan.processes):
            with suppress(OSError, ValidationError):
                text = (self._folder / f"{rank}.json").read_text(encoding="utf-8")
                live = LiveRank.model_validate_json(text)
                if live.written >= self._began:
                    found.append(live)
        self._ranks = found

    def text(self, loss: float) -> str:
        """For the bar: loss, speed, MFU on a GPU, memory of the fullest rank, and the largest loss of time."""
        parts = [f"loss {loss:.3f}", f"{self.rate:,.0f} tokens/s"]
        if (mfu := self.mfu) is not None:
            parts.append(f"MFU {mfu:.0%}")
        if self._ranks:
            fullest = max(self._ranks, key=lambda live: live.peak_memory_bytes)
            where = f" (rank {fullest.rank})" if self._plan.processes > 1 else ""
            parts.append(f"{fullest.peak_memory_bytes / 2**30:.1f} GiB{where}")
            name, share = max(
                ((name, max(live.shares[name] for live in self._ranks)) for name in WORDS),
                key=lambda pair: pair[1],
            )
            if share > WORTH_A_WORD:
                parts.append(f"{WORDS[name]} {share:.0%}")
        return ", ".join(parts)

    def metrics(self) -> dict[str, float]:
        """For MLflow: the rate at every step; the rest at a bounded rate, shares as the mean over ranks."""
        values = {"tokens_per_second": self.rate}
        now = time.monotonic()
        if not self._ranks or now - self._logged < METRIC_SECONDS:
            return values
        self._logged = now
        if (mfu := self.mfu) is not None:
            values["mfu"] = mfu
        for name in SHARES:
            values[f"time_share/{name}"] = sum(live.shares[name] for live in self._ranks) / len(self._ranks)
        for live in self._ranks:
            values[f"peak_memory_gib/rank_{live.rank}"] = live.peak_memory_bytes / 2**30
            if live.gpu_utilisation_percent is not None:
                values[f"gpu_utilisation_percent/rank_{live.rank}"] = live.gpu_utilisation_percent
        return values
