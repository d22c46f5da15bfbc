"""The model in numbers, plans and what they cost."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tasks.contracts.base import Contract, Degree, Precision


class MoeSpec(Contract):
    """Mixture of experts: `experts` routed experts of width `ffn` a layer, `active` of them a token.

    `shared_ffn` is the width of what every token passes beside the routed experts (0 for none);
    `dense_layers` decoder layers have an ordinary MLP instead. `parameters` counts all routed experts of all layers.
    """

    experts: int
    active: int
    ffn: int
    shared_ffn: int
    dense_layers: int
    parameters: int


class VisionSpec(Contract):
    """A ViT tower and its projector in front of a decoder.

    A tile is `image_size` pixels square and gives `patches` positions in the tower (class token included)
    and `tile_tokens` tokens in the decoder. `grid_pinpoints` are the (height, width) an any-resolution image may be
    fitted to; empty for one tile an image. `feature_layers` tower layers run before the projector reads them.
    """

    layers: int
    feature_layers: int
    hidden: int
    ffn: int
    heads: int
    image_size: int
    patch_size: int
    patches: int
    tile_tokens: int
    grid_pinpoints: tuple[tuple[int, int], ...]
    tower_parameters: int
    projector_parameters: int


class ModelSpec(Contract):
    """Shapes and exact parameter counts, read from a config alone.

    `linear_shapes` lists (name, d_in, d_out) of one decoder layer: the LoRA targets of "all-linear" (routed experts
    are no such modules). `parameters` counts everything once, tied tables too, tower and projector included;
    `layer_parameters` one decoder layer (the average where layers differ), `embedding_parameters` one vocabulary table.
    `position` is how positions enter; `fused_qkv` that one linear makes query, key and value. `family` is the
    decoder's model_type, with or without a vision tower; `sliding_window` is None unless every layer has one.
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
    fused_qkv: bool
    query_key_norm: bool
    position: Literal["rope", "alibi", "learned"]
    sliding_window: int | None
    parameters: int
    layer_parameters: int
    embedding_parameters: int
    linear_shapes: tuple[tuple[str, int, int], ...]
    moe: MoeSpec | None
    vision: VisionSpec | None


class Plan(Contract):
    """How the work is split; it never changes what is learned.

    Sizes are degrees of the mesh axes. global batch = micro_batch x accumulation x data-parallel degree. `sharding`
    says what the dp_shard axis shares out: optimizer state (zero1), gradients too (zero2), weights too (zero3, fsdp2).
    `offload` is where optimizer state lives while it is not used, `offload_parameters` where the weights do.
    `virtual_stages` is the number of model chunks a pipeline rank holds (interleaved and zero-bubble schedules).
    `compiled`: decoder layers and loss run as kernels fused by torch.compile. `replication` data_parallel is torch's
    DataParallel: one process, whose micro-batches have `micro_batch` rows for each of dp_replicate GPUs.
    `deepspeed_config` is a JSON object of keys that a user's own file hands to DeepSpeed as they are, or "".
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
    replication: Literal["ddp", "data_parallel"] = "ddp"
    sharding: Literal["none", "fsdp2", "zero0", "zero1", "zero2", "zero3"] = "none"
    sequence_parallel: bool = False
    virtual_stages: Degree = 1
    offload_parameters: Literal["none", "cpu", "nvme"] = "none"
    compiled: bool = False
    deepspeed_config: str = ""

    @property
    def on_disk(self) -> bool:
        """Whether some of it lies on NVMe."""
        return "nvme" in (self.offload, self.offload_parameters)

    @property
    def data_parallel(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.data_parallel * self.tp * self.pp

    @property
    def processes(self) -> int:
        """One a rank, and one for all GPUs under torch's DataParallel."""
        return 1 if self.replication == "data_parallel" else self.world_size

    @property
    def shares(self) -> int:
        """Processes, or groups of them, among which a step's samples are dealt out."""
        return 1 if self.replication == "data_parallel" else self.data_parallel

    @property
    def rows(self) -> int:
        """Rows of a micro-batch of one share."""
        return self.micro_batch * (self.data_parallel // self.shares)

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.accumulation * self.data_parallel

    @property
    def name(self) -> str:
        """Short name: single, ddp2, fsdp4, zero3dp8, dp2fsdp4tp2, tp2sppp2, pp2-gpipe, pp2v2-zerobubble, zero2dp1+cpu.

        A pipeline without a word runs 1f1b, or interleaved1f1b with several chunks a rank.
        """
        parts: list[str] = []
        if self.sharding.startswith("zero"):
            parts.append(f"{self.sharding}dp{self.dp_shard}")
        elif self.dp_shard > 1:
            parts.append(f"fsdp{self.dp_shard}")
        if self.tp > 1:
            parts.append(f"tp{self.tp}{'sp' if self.sequence_parallel else ''}")
        if self.pp > 1:
            parts.append(f"pp{self.pp}" + (f"v{self.virtual_stages}" if self.virtual_stages > 1 else ""))
        if self.dp_replicate > 1:
            alone = "ddp" if self.replication == "ddp" else "dataparallel"
            parts.insert(0, f"{'dp' if parts else alone}{self.dp_replicate}")
        where = f"-{self.schedule}" if self.schedule in ("gpipe", "zerobubble") else ""
        where += "" if self.offload == "none" else f"+{self.offload}"
        if self.offload_parameters != "none":
            where += f"+params-{self.offload_parameters}"
        return ("".join(parts) or "single") + where


class CostEstimate(Contract):
    """Predicted cost of one Plan on the fullest rank: bytes by term, seconds of a step by term.

    `memory_bytes` is the peak of training; `save_bytes` and `evaluation_bytes` are the peaks of the whole GPU while a
    checkpoint is written and while held-out rows are scored. `host_bytes` is host memory of one node by term.
    `tokens_per_second` counts real tokens of all GPUs. `mfu` is model FLOPs (6 a matmul parameter and token for full
    tuning, 4 for frozen ones, causal attention, no recomputation) over the data sheet's peak of all GPUs.
    """

    memory_bytes: dict[str, int]
    memory_limit_bytes: int
    seconds: dict[str, float]
    tokens_per_second: float
    mfu: float = 0.0
    save_bytes: int = 0
    evaluation_bytes: int = 0
    host_bytes: dict[str, int] = Field(default_factory=dict)
    host_limit_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(self.memory_bytes.values())

    @property
    def peak_bytes(self) -> int:
        """The largest of training, saving and evaluation."""
        return max(self.total_bytes, self.save_bytes, self.evaluation_bytes)

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
    """plan.json: the choice and why, the runners-up, and every rejection with its reason.

    `rejected` has one plan a layout and level that does not fit, its smallest such micro-batch, and one a broken rule
    (without an estimate). `fit` and `unfit` count all; of many that fit only the best are told. `hopeless` layouts were
    not costed, since they are far slower than the choice even at the data sheet's peak. `deepspeed_config` is the hash
    of the user's own file, if the plan was made with one.
    """

    chosen: Candidate
    why: str
    runners_up: tuple[Candidate, ...]
    rejected: tuple[Candidate, ...]
    resolved: Resolved
    model: ModelSpec
    advice: tuple[str, ...] = ()
    deepspeed_config: str | None = None
    fit: int = 0
    unfit: int = 0
    hopeless: int = 0
