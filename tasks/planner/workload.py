"""What is to be trained, and how the trainer keeps and computes it: what the cost model needs beside model and plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

from tasks.contracts import DataManifest, Plan, Precision
from tasks.optimizers import Optim
from tasks.params import CommunicationHook, TrainParams

Method = Literal["full", "lora", "qlora"]
StageSplit = Literal["even", "by_flops"]

# NF4 keeps 4 bits a weight and a float32 scale a block of 64; double quantisation makes the scales 8 bits
# and adds a float32 a block of 256 scales (QLoRA, arXiv:2305.14314, section 3): 0.5 + 1/64 + 4/(64 x 256).
NF4_BLOCK = 64
NF4_BYTES = 0.5 + 1 / NF4_BLOCK + 4 / (NF4_BLOCK * 256)
# Scales of a part of a matrix stay float32, since blocks of scales do not end where it does.
NF4_CUT_BYTES = 0.5 + 4 / NF4_BLOCK


@dataclass(frozen=True)
class Workload:
    """One recipe in numbers.

    `sequence` is the longest row in tokens, image tokens included, and decides memory; `mean_row` the average row
    and decides speed. `padded` micro-batches are filled up to their longest row, see `row_width`; packed or even
    ones are not. Where rows are packs of documents, attention is within these, and `attended` is the length of the
    one that an average token is in. `tiles` vision tiles an average row has, `longest_tiles` the fullest row.
    `communication_hook` is what DDP's gradients are rounded to while they are sent.
    """

    method: Method
    precision: Precision
    sequence: int
    mean_row: float
    lora_rank: int = 16
    lora_targets: str | Sequence[str] = "all-linear"
    padded: bool = False
    attended: float | None = None
    tiles: float = 0.0
    longest_tiles: int = 0
    train_tower: bool = False
    train_embeddings: bool = False
    communication_hook: CommunicationHook = "none"
    optim: Optim = "adamw_torch"


def uses_block_mask(work: Workload, device: str) -> bool:
    """Whether packed documents are kept apart by a mask: every pair of a row's tokens is then computed, and there is no
    flash attention. In half precision on GPUs attention is told where documents begin (tasks/trainer/isolation.py).
    """
    return work.attended is not None and (device == "cpu" or work.precision in ("float32", "float64"))


def row_width(work: Workload, plan: Plan) -> float:
    """Tokens a row of an average micro-batch is filled up to.

    Samples of a step are dealt out by length (tasks/data/order.py): `accumulation` groups, each filled up to its own
    longest row. A pipeline's micro-batches are of one shape, so all of a step are filled up to its longest. Lengths
    are taken to be spread as longest x u^k with u even in 0..1 and k such that the mean is right.
    """
    groups = plan.accumulation if plan.pp == 1 else 1
    if not work.padded or groups == plan.global_batch or work.sequence <= work.mean_row:
        return work.mean_row
    power = work.sequence / work.mean_row - 1
    return work.sequence * _mean_group_end(round(power, 3), groups, plan.global_batch)


@lru_cache(maxsize=4096)
def _mean_group_end(power: float, groups: int, rows: int) -> float:
    """The mean, over `groups` equal groups of `rows` sorted rows, of the last row's (position / rows) ** power."""
    size = rows / groups
    ends = (((group + 1) * size - 0.5) / rows for group in range(groups))
    return float(sum(end**power for end in ends)) / groups


@dataclass(frozen=True)
class SavedBytes:
    """Bytes a token and layer that the forward pass keeps for the backward pass, by width.

    hidden, ffn, query (heads x head_dim) and key (kv_heads x head_dim, key and value together) are
    factors of those widths; `norm` is what a query and key norm (qwen3) adds to query and key.
    """

    hidden: float
    ffn: float
    query: float
    key: float
    norm: float


@dataclass(frozen=True)
class Software:
    """How a trainer keeps its states and runs its layers. Bytes are of one parameter unless said otherwise.

    Full tuning keeps `weight` + `cast` (the copy autocast makes) + `gradient` + `accumulated` (a float32 sum beside
    the gradients while accumulating) + `moments` + `master`. `frozen` is the stored width of frozen weights (None:
    the compute precision), `four_bit` of NF4 ones. `saved` overrides the activation table. `scores` bytes a head and
    pair of positions are kept by attention that stores its scores (0 for flash). `logits` bytes a token and
    vocabulary entry stand at the peak; `chunked_loss` computes the loss in pieces instead. `gathered_inputs` bytes a
    token and hidden entry of a layer stay unsharded under tensor parallelism without pipeline stages. Selective
    checkpointing keeps the share `selective` of the matrix products' outputs. Unless `gradients_stay`, there are none
    while the only micro-batch of a step goes forward. `loads_whole`: every rank reads the whole model before it is
    sharded. `context` bytes are outside the allocator, `reserved` is the ratio of reserved to allocated memory.

    `elementwise` bytes of traffic, a token and hidden (`[0]`) or ffn entry (`[1]`), are what a layer's forward pass
    moves beside its matmuls. `launch` seconds is the least time of a layer's forward pass, for its kernels cannot be
    launched faster; each adapter adds `adapter_launch`, each 4-bit matrix `four_bit_launch`, gathering sharded weights
    `gather_launch` (these two are read off LitGPT's and Qwen's published runs), cutting a layer over ranks
    `cut_launch`. `overlap` is the share of the data-parallel traffic that may hide behind computing. `host_wait`
    seconds a tensor-parallel rank are the least a layer takes, without and with pipeline stages: what the host spends
    on cutting and joining tensors in trainers where that grows with the ranks. `whole_tables`: sharded vocabulary
    tables stay gathered in float32 from their first use to the end of the backward pass, with a whole gradient and the
    buffer it is scattered from.

    `step` seconds are spent once a step outside the model, and attention reaches the share `attention` of the peak
    (None: the GPU generation's). Adapters move the share `adapter_traffic` of what PEFT's do. `fused_loss`: where the
    whole vocabulary is on one rank, the loss reads logits in the compute precision and keeps them alone. `compiling`
    has the fields that are others where a plan's layers are compiled: fused kernels are fewer, move and keep less.

    `native`: cut and staged as this project's own trainer does it. Without sequence parallelism all that is hidden
    wide is whole on every tensor-parallel rank, with it the inputs of attention and MLP are kept whole; collectives
    are sent again when their layer is computed again; stages pass on whole rows; and full tuning passes them, and
    keeps them as a recomputed layer's input, in float32. `scales_whole`: NF4 as this project's own trainer has it:
    codes are sharded and sent, scales are not, and a product keeps no input.

    `flat_parts`: ZeRO as DeepSpeed keeps it for this project, see `zero.py`. `gather` is the width in which trained
    weights and their gradients are sent (None: the compute precision), `gradient_trips` how often ZeRO-1 and 2 send
    gradients around the ring: 2 where they are summed everywhere and then cut. `hook_launch` is added for a
    layer whose gradients are put into buckets.
    """

    name: str
    weight: float = 4
    cast: float = 2
    gradient: float = 4
    accumulated: float = 0
    moments: float = 8
    master: float = 0
    bucket: float = 4
    frozen: float | None = None
    four_bit: float = NF4_BYTES
    saved: Mapping[tuple[str, int], SavedBytes] = field(default_factory=dict)
    residual: float | None = None
    scores: float = 0
    logits: float = 14
    chunked_loss: bool = False
    gathered_inputs: float = 0
    selective: float = 1.0
    loads_whole: bool = False
    context: float = 1.0 * 2**30
    reserved: float = 1.0
    stage_split: StageSplit = "even"
    elementwise: tuple[float, float] = (60.0, 12.0)
    launch: float = 1.0e-3
    adapter_launch: float = 0.2e-3
    four_bit_launch: float = 0.1e-3
    gather_launch: float = 1.0e-3
    whole_tables: bool = False
    gradients_stay: bool = False
    host_wait: tuple[float, float] = (0.0, 0.0)
    overlap: float = 0.9
    gradient_traffic: float = 4
    vocab_parallel: bool = True
    zero_bucket: float = 0.4e9
    native: bool = False
    scales_whole: bool = False
    cut_launch: float = 0.0
    step: float | None = None
    attention: float | None = None
    adapter_traffic: float = 1.0
    fused_loss: bool = False
    compiling: Mapping[str, Any] = field(default_factory=dict)
    flat_parts: bool = False
    gather: float | None = None
    gradient_trips: int = 1
    hook_launch: float = 0.0

    @property
    def compiled_memory(self) -> bool:
        """Whether compiled layers take other memory than plain ones."""
        return not self.compiling.keys().isdisjoint(("saved", "fused_loss"))

    @cached_property
    def compiled(self) -> Software:
        """The same trainer with compiled layers."""
        return replace(self, **self.compiling)


# This project's trainer: float32 weights, gradients and AdamW moments, autocast (tasks/trainer/torch_engine.py).
# Its times were fitted to runs on one H200 (benchmarks/results/planner-gpu.json, and planner-gpu-compiled.json for what
# compiling changes) with the generation's matmul constants as they are, which are a little slow for it: the traffic of
# compiled layers has come out smaller than it can be. A layer takes 3.8 ms of launches forward and backward in full
# tuning and 6.3 ms with seven adapters; compiled 2.3 and 4.0. Gathering and scattering costs 2.1 ms more a layer's
# forward pass (planner-gpu-fsdp2.json), cutting 0.8 ms (one run: LoRA of a 7 B model on two H200).
# Its adapters take half-precision inputs as they are (`stay_in_half` of tasks/trainer/adapters.py), where PEFT's
# would keep a float32 copy: counted as `SAVED` of activations.py was. What compiled layers keep is read off
# planner-gpu-compiled.json, but for the norms of query and key, which none of its models has.
COMPILED_SAVED = {
    (method, width): SavedBytes(
        hidden=5 * width, ffn=3 * width, query=2 * width, key=2 * width, norm=2 * width
    )
    for method in ("full", "lora")
    for width in (2, 4)
}
ELASTANE = Software(
    name="elastane",
    gather_launch=2.1e-3,
    whole_tables=True,
    native=True,
    scales_whole=True,
    saved={("lora", 2): SavedBytes(hidden=12, ffn=8, query=4, key=4, norm=4)},
    cut_launch=0.8e-3,
    step=0.006,
    attention=0.4,
    adapter_traffic=0.55,
    launch=1.25e-3,
    adapter_launch=0.12e-3,
    elementwise=(110, 22),
    compiling={
        "fused_loss": True,
        "saved": COMPILED_SAVED,
        "adapter_traffic": 0.65,
        "launch": 0.75e-3,
        "adapter_launch": 0.085e-3,
        "elementwise": (5.0, 1.0),
    },
)
ELASTANE_CUT = replace(ELASTANE, four_bit=NF4_CUT_BYTES)
# DeepSpeed under this project's loop trains what the engine torch trains, in float32 under autocast, and sends it as it
# is. It gathers matrix by matrix with hooks around every module: taken as twice what FSDP2 needs a layer; and the hooks
# of ZeRO-1 and 2, one a tensor, as 80 microseconds each. Neither is measured.
DEEPSPEED = replace(
    ELASTANE,
    name="deepspeed",
    gather_launch=4.2e-3,
    hook_launch=0.25e-3,
    whole_tables=False,
    flat_parts=True,
    gather=4,
    gradient_trips=2,
)


def software_of(plan: Plan, software: Software) -> Software:
    """What keeps the states of a plan: this project's own habits differ by engine, other trainers' do not."""
    if software is ELASTANE and plan.engine == "deepspeed":
        software = DEEPSPEED
    elif software is ELASTANE and plan.tp > 1:
        software = ELASTANE_CUT
    return software.compiled if plan.compiled else software


def workload(train: TrainParams, manifest: DataManifest, precision: Precision) -> Workload:
    """The recipe of params.yaml on the prepared rows."""
    split, packed = manifest.train, manifest.packed
    return Workload(
        method=train.finetuning_type,
        precision=precision,
        padded=train.sample_order != "by_length",
        sequence=packed.longest if packed else split.longest,
        mean_row=split.tokens / manifest.samples,
        attended=packed.attended if packed else None,
        lora_rank=train.lora.rank,
        lora_targets=train.lora.targets if isinstance(train.lora.targets, str) else tuple(train.lora.targets),
        train_embeddings=train.lora.train_embeddings,
        communication_hook=train.communication_hook,
        optim=train.optim,
    )
