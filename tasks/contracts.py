"""The nouns that stages hand to each other: frozen, closed, JSON in and out."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks.errors import UserError

Precision = Literal["float32", "bfloat16", "float16"]
FinetuningType = Literal["lora", "full"]
Degree = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]


class Contract(BaseModel):
    """Base of all nouns: immutable, unknown keys are errors, files are written whole or not at all."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads JSON.

        Raises:
            UserError: the file is missing or does not hold this contract.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise UserError(
                f"{path} is missing, and this step reads it; run the earlier stages first (`elastane run`)"
            ) from None
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise UserError(
                f"{path} does not hold a {cls.__name__} of this version of elastane "
                f"({error.errors()[0]['msg']}); delete it and run `elastane run`"
            ) from None

    def to_json(self) -> str:
        """Canonical text: the same contract always gives the same bytes."""
        return json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True, ensure_ascii=False) + "\n"

    def write(self, path: Path) -> None:
        """Writes the file at once: a reader sees the old content or the new, never a part."""
        write_text(path, self.to_json())


def write_text(path: Path, text: str) -> None:
    """Replaces `path` atomically (never through a hard link that a DVC cache shares)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


# --- data ---------------------------------------------------------------------------------------


class BaseModelRef(Contract):
    """The base model as prepare_data found it (`data/base/base.json`).

    `weights` is "here" when they were converted into `data/base/`, else "source": they stay where
    `name_or_path` says. `content_hash` covers the weights and the config as they are trained on,
    `source_hash` the files they were made from (the same unless they were converted).
    """

    name_or_path: str
    revision: str | None
    kind: Literal["builtin", "gguf", "folder", "hub"]
    weights: Literal["here", "source"]
    content_hash: str
    source_hash: str
    trust_remote_code: bool


class SplitCounts(Contract):
    """One split. `target_tokens` are those the loss is taken on; `longest` is in tokens."""

    rows: Count
    tokens: Count
    target_tokens: Count
    longest: Count


class LengthBin(Contract):
    """Rows with at most `upper` tokens (and more than the bin before)."""

    upper: int
    rows: Count


class DataManifest(Contract):
    """What prepare_data made. rows_in = train.rows + validation.rows + sum(rejected.values())."""

    source: str
    source_fingerprint: str
    format: str
    content_hash: str
    max_length: int
    rows_in: Count
    train: SplitCounts
    validation: SplitCounts
    truncated: Count
    length_histogram: tuple[LengthBin, ...]
    rejected: dict[str, int]


# --- hardware -----------------------------------------------------------------------------------


class Gpu(Contract):
    """One visible GPU. Memory in bytes as the driver states it."""

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]


class Link(Contract):
    """How two visible GPUs (indices) are joined; `nvlinks` counts active NVLink lanes."""

    a: int
    b: int
    kind: Literal["nvlink", "pcie", "system", "unknown"]
    nvlinks: Count


class HardwareProfile(Contract):
    """Stable facts of this machine. Measured rates live in a cache keyed by `identity`."""

    device: Literal["cuda", "cpu"]
    gpus: tuple[Gpu, ...]
    links: tuple[Link, ...]
    driver: str | None
    cpu_name: str
    cpu_cores: int
    host_memory_bytes: int
    host_memory_source: Literal["cgroup", "physical"]
    shm_bytes: int
    notes: tuple[str, ...]

    @property
    def identity(self) -> str:
        from hashlib import sha256

        return sha256(self.to_json().encode()).hexdigest()[:16]


# --- planning -----------------------------------------------------------------------------------


class ModelSpec(Contract):
    """Shapes and exact parameter counts, read from a config alone.

    `linear_shapes` lists (name, d_in, d_out) of one decoder layer: the LoRA targets of "all-linear".
    """

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    tied_embeddings: bool
    gated_mlp: bool
    parameters: int
    embedding_parameters: int
    linear_shapes: tuple[tuple[str, int, int], ...]


class Plan(Contract):
    """How the work is split; it never changes what is learned.

    Sizes are degrees of the mesh axes. global batch = micro_batch x accumulation x data-parallel degree.
    """

    engine: Literal["torch", "deepspeed"]
    device: Literal["cuda", "cpu"]
    backend: Literal["nccl", "gloo"]
    dp_replicate: Degree
    dp_shard: Degree
    tp: Degree
    pp: Degree
    schedule: Literal["none", "gpipe", "1f1b", "interleaved1f1b", "zerobubble"]
    micro_batch: Degree
    accumulation: Degree
    activation_checkpointing: Literal["none", "selective", "full"]
    offload: Literal["none", "cpu", "nvme"]

    @property
    def data_parallel(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.data_parallel * self.tp * self.pp

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.accumulation * self.data_parallel

    @property
    def name(self) -> str:
        """Short name as `certify` uses it: single, ddp2, fsdp4, tp2pp2."""
        parts = [f"{axis}{size}" for axis, size in (("tp", self.tp), ("pp", self.pp)) if size > 1]
        if self.dp_shard > 1:
            parts.insert(0, f"fsdp{self.dp_shard}")
        if self.dp_replicate > 1:
            parts.insert(0, f"{'dp' if parts else 'ddp'}{self.dp_replicate}")
        return "".join(parts) or "single"


class CostEstimate(Contract):
    """Predicted cost of one Plan on the fullest rank: bytes by term, seconds of a step by term."""

    memory_bytes: dict[str, int]
    memory_limit_bytes: int
    seconds: dict[str, float]
    tokens_per_second: float

    @property
    def total_bytes(self) -> int:
        return sum(self.memory_bytes.values())

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())


class Candidate(Contract):
    """A Plan with its cost; `rejected` is the one sentence why it cannot be, or None."""

    plan: Plan
    estimate: CostEstimate | None
    rejected: str | None


class Resolved(Contract):
    """What the recipe left to `auto`, resolved once on the first machine and frozen for the run."""

    precision: Precision
    token_budget: int | None


class PlanReport(Contract):
    """plan.json: the choice and why, the runners-up, and every rejection with its reason."""

    chosen: Candidate
    why: str
    runners_up: tuple[Candidate, ...]
    rejected: tuple[Candidate, ...]
    resolved: Resolved
    model: ModelSpec


# --- training -----------------------------------------------------------------------------------


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


# --- evaluation and registry --------------------------------------------------------------------


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
    run_key: str
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
