"""Checkpoints, what was learned and how fast."""

from __future__ import annotations

from typing import Literal

from tasks.contracts.base import Contract, Count, Degree, FinetuningType, Precision
from tasks.contracts.data import BaseModelRef
from tasks.contracts.planning import Plan


class CheckpointManifest(Contract):
    """Written last: a checkpoint folder without it does not count."""

    run_key: str
    step: Count
    samples_seen: Count
    world_size: Degree
    plan: Plan


class FinalManifest(Contract):
    """`checkpoints/final/manifest.json`: only what the recipe determines."""

    run_key: str
    content_hash: str
    finetuning_type: FinetuningType
    base: BaseModelRef


class TrainReport(Contract):
    """What was learned. Only what the recipe determines: no speed, no plan."""

    run_key: str
    content_hash: str
    precision: Precision
    steps: Count
    samples_seen: Count
    tokens: Count
    target_tokens: Count
    first_loss: float
    final_loss: float
    trainable_parameters: int
    total_parameters: int


class RankPerformance(Contract):
    """One rank: shares of wall time (sum 1), GPU utilisation in percent, memory in bytes."""

    rank: int
    data_wait: float
    compute: float
    communication: float
    idle: float
    gpu_utilisation_percent: float | None
    peak_memory_bytes: int
    peak_memory_kind: Literal["cuda_reserved", "process_rss"]


class TrainPerformance(Contract):
    """How fast it was and on what. No stage depends on it."""

    run_key: str
    plan: Plan
    hardware: str
    steps_timed: Count
    tokens_per_second: float
    seconds_per_step: float
    train_seconds: float
    starts: int
    ranks: tuple[RankPerformance, ...]
    advice: str
