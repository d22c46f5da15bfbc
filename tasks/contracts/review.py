"""How good it is, where it is registered, how a stage ended."""

from __future__ import annotations

from typing import Literal

from tasks.contracts.base import Contract, Count


class Score(Contract):
    """Loss is the mean negative log-likelihood a target token, in nats; perplexity its exponential."""

    loss: float
    perplexity: float
    target_tokens: Count


class Sample(Contract):
    """One held-out prompt, its reference, and both models' own (generated) answers."""

    prompt: str
    reference: str
    base: str
    tuned: str


class EvalReport(Contract):
    run_key: str
    content_hash: str
    data_hash: str
    rows: Count
    base: Score
    tuned: Score
    loss_improvement: float


class Samples(Contract):
    """`note` says why some held-out rows have no answers here; "" where there is nothing to say."""

    run_key: str
    note: str = ""
    samples: tuple[Sample, ...]


class Registration(Contract):
    """`version` is None when the gate refused; `reason` says why in one sentence."""

    run_key: str
    content_hash: str
    mlflow_run_id: str
    model_name: str
    version: int | None
    alias: str | None
    reason: str


class StageStatus(Contract):
    """runs/status/<stage>.json: how the stage ended, since DVC hides its exit code."""

    stage: str
    state: Literal["running", "succeeded", "failed"]
    exit_code: int
    message: str
    pid: int
