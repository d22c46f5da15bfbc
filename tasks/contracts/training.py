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
    """`checkpoints/final/manifest.json`: only what the recipe determines.

    `embeddings_trained`: beside an adapter lie tables that take the place of the base's, adapter switched on or off.
    """

    run_key: str
    content_hash: str
    finetuning_type: FinetuningType
    base: BaseModelRef
    embeddings_trained: bool = False


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


SHARES = (
    "data_wait",
    "forward",
    "backward",
    "communication",
    "pipeline_wait",
    "optimizer",
    "checkpoint",
    "idle",
)


class RankPerformance(Contract):
    """One rank since this start: shares of wall time (sum 1), GPU utilisation in percent, memory in bytes.

    `communication` is what hides behind no computing: waiting for gradients to be summed or scattered and for weights
    to be gathered, and for slower ranks. Under tensor parallelism its exchanges are part of forward and backward.
    `pipeline_wait` is what a pipeline stage waits for its neighbours, `idle` what is nothing of these: the host,
    logging. `queued` is the share of a step by which a GPU was behind the host when the last backward pass had been
    issued (None on a CPU): near 0, the host launches kernels no faster than the GPU runs them.
    """

    rank: int
    steps: Count
    data_wait: float
    forward: float
    backward: float
    communication: float
    pipeline_wait: float
    optimizer: float
    checkpoint: float
    idle: float
    queued: float | None
    gpu_utilisation_percent: float | None
    peak_memory_bytes: int
    peak_memory_kind: Literal["cuda_reserved", "process_rss"]

    @property
    def shares(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in SHARES}


class Predicted(Contract):
    """What the planner said of the plan that ran, for the fullest rank."""

    tokens_per_second: float
    mfu: float
    peak_memory_bytes: int


class TrainPerformance(Contract):
    """How fast it was and on what. No stage depends on it.

    `steps_timed` counts the steps of this start, under `plan`; speeds are theirs, saving left out. `train_seconds` is
    of all starts. `mfu` is as in `CostEstimate`, over the rows that were trained on; None on a CPU and on a GPU whose
    data sheet is not known. `predicted` stands here if the plan that ran is the one in plan.json.
    """

    run_key: str
    plan: Plan
    hardware: str
    steps_timed: Count
    tokens_per_second: float
    seconds_per_step: float
    train_seconds: float
    starts: int
    ranks: tuple[RankPerformance, ...]
    bottleneck: str = ""
    advice: str
    mfu: float | None = None
    predicted: Predicted | None = None
