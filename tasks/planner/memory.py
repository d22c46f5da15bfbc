"""Bytes of one GPU by term, in closed form.

Elastane's trainer keeps weights to be trained in float32 with float32 gradients and, of AdamW, float32 moments
(4 + 4 + 4 + 4 = 16 bytes a parameter; ZeRO, arXiv:1910.02054, section 3.1, counts the same states) and
computes under autocast. Frozen weights are kept in the compute precision and have neither gradient nor
optimizer state. Other trainers' habits are a `Software`.
"""

from __future__ import annotations

from tasks.contracts import ModelSpec, Plan
from tasks.planner.activations import (
    COMPUTE_BYTES,
    FLOAT32,
    active_ffn,
    fuses_loss,
    layer_bytes,
    logit_bytes,
    mask_bytes,
    vision_bytes,
)
from tasks.planner.frozen import frozen_bytes, gathered_bytes
from tasks.planner.model_spec import lora_parameters
from tasks.planner.moments import with_moments
from tasks.planner.stages import in_flight, last_rank, rank_layers, stays_gathered
from tasks.planner.workload import ELASTANE, Software, Workload, software_of
from tasks.planner.zero import zero_states

GIB = 2**30

# NCCL keeps buffers a communicator; a CPU process with torch, transformers and peft loaded has 0.4 GiB resident
# (measured).
FIXED_NCCL = 0.4 * GIB
FIXED_CPU = 0.5 * GIB
# FSDP2 and ZeRO-3 gather a layer while they prefetch the next.
GATHERED_UNITS = 2


def trainable_parameters(spec: ModelSpec, work: Workload) -> int:
    """Parameters of the whole model that get a gradient; a vision tower is frozen unless the recipe says so."""
    vision = spec.vision
    tower = vision.tower_parameters if vision else 0
    if work.method == "full":
        return spec.parameters - (0 if work.train_tower else tower)
    count = lora_parameters(spec, work.lora_rank, work.lora_targets)
    if vision:
        count += vision.projector_parameters + (tower if work.train_tower else 0)
    if work.train_embeddings:
        count += spec.embedding_parameters * (1 if spec.tied_embeddings else 2)
    return count


def memory(spec: ModelSpec, plan: Plan, work: Workload, software: Software = ELASTANE) -> dict[str, int]:
    """Peak bytes of the fullest GPU by term, at the start of a backward pass with gradients already there.

    Every row of the micro-batch is taken to be as long as the longest. With pipeline stages it is the maximum over
    them that is told.
    """
    software = with_moments(software_of(plan, software), spec, work)
    stages = rank_layers(spec, plan, software.stage_split)
    terms: dict[str, float] = {}
    for stage in range(plan.pp) if plan.pp <= 4 else _suspects(stages):
        here = _stage(spec, plan, work, software, stage, stages[stage])
        if not terms or sum(here.values()) > sum(terms.values()):
            terms = here
    if software.loads_whole and plan.sharding != "none":
        whole = spec.parameters * COMPUTE_BYTES[work.precision] * (1 + 1 / plan.dp_shard)
        terms["loading"] = max(0.0, whole - sum(terms.values()))
    if software.reserved != 1:
        inside = sum(size for name, size in terms.items() if name != "fixed")
        terms["fragmentation"] = inside * (software.reserved - 1)
    return {name: int(size) for name, size in terms.items()}


def _suspects(stages: tuple[int, ...]) -> list[int]:
    """Stages that can be the fullest: in flight counts fall, so each first stage with more layers than all before."""
    chosen, most = [], -1
    for stage, layers in enumerate(stages):
        if layers > most:
            chosen.append(stage)
            most = layers
    return sorted({*chosen, len(stages) - 1})


def _stage(
    spec: ModelSpec, plan: Plan, work: Workload, software: Software, stage: int, layers: int
) -> dict[str, float]:
    held, trained = stage_parameters(spec, plan, work, stage, layers)
    states = zero_states if software.flat_parts else _states
    terms = states(spec, plan, work, software, held, trained)
    tokens = plan.micro_batch * work.sequence
    compute = COMPUTE_BYTES[work.precision]
    flight = in_flight(plan, stage)
    per_layer, kept = layer_bytes(spec, plan, work, software)
    # With recomputation one layer's whole working set stands beside what is kept of the layers.
    working = per_layer - kept if plan.activation_checkpointing != "none" else 0.0
    terms["activations"] = tokens * (flight * layers * kept + (working if layers else 0.0))
    terms["activations"] += flight * plan.virtual_stages * mask_bytes(spec, plan, work, software)
    # Each micro-batch in flight has its own casts; what is gathered is cast once.
    terms["casts"] = terms.get("casts", 0.0) * flight
    if stage == 0:
        if stays_gathered(plan) and work.method == "full":  # the embedding is gathered as it is, in float32
            terms["gathered"] += (FLOAT32 - compute) * spec.embedding_parameters / plan.tp
        terms["activations"] += tokens * flight * compute * spec.hidden
        terms["vision"] = vision_bytes(spec, plan, work)
    if stage == last_rank(plan):
        share = plan.tp if software.vocab_parallel else 1
        size = 4.0 * compute if software.chunked_loss else logit_bytes(work.precision, plan, software)
        pieces = 8 if software.chunked_loss else 1
        # GPipe computes the losses of all micro-batches before the first backward pass, which needs their softmax,
        # or logits.
        softmax = compute if fuses_loss(plan, software) else FLOAT32
        waiting = (plan.accumulation - 1) * softmax if plan.schedule == "gpipe" else 0
        terms["logits"] = tokens * spec.vocab * (size + waiting) / share / pieces
        if work.method == "full" and fuses_loss(plan, software):
            terms["logits"] += (
                compute * spec.embedding_parameters
            )  # the head's gradient, once there is little else
    terms["fixed"] = fixed_bytes(plan, software)
    # ZeRO-3 of DeepSpeed has room for them from the start.
    stay = software.gradients_stay or is_ddp(plan) or (software.flat_parts and plan.sharding == "zero3")
    if plan.accumulation == 1 and not stay:
        # The backward pass frees activations and logits as it makes gradients: only the excess adds to the peak.
        freed = terms["activations"] + terms.get("logits", 0.0)
        terms["gradients"] = max(0.0, terms["gradients"] - freed)
    return terms


def is_ddp(plan: Plan) -> bool:
    """Plain copies of a whole model, whose gradients are views of buckets. Copies beside tensor or pipeline parallelism
    have none: what they trained is summed after the last backward pass.
    """
    return plan.sharding == "none" and plan.shares > 1 and plan.tp == plan.pp == 1


def stage_parameters(
    spec: ModelSpec, plan: Plan, work: Workload, stage: int, layers: int
) -> tuple[float, float]:
    """Parameters of one rank of a stage after tensor and expert splitting: (all, trained)."""
    vision = spec.vision
    tower = vision.tower_parameters if vision else 0
    projector = vision.projector_parameters if vision else 0
    first, last = stage == 0, stage == last_rank(plan)
    tables = spec.embedding_parameters * (
        (1 if first else 0) + (1 if last and not (spec.tied_embeddings and plan.pp == 1) else 0)
    )
    positions = spec.max_positions * spec.hidden if first and spec.position == "learned" else 0
    split = (layers * spec.layer_parameters + tables + positions) / plan.tp
    front = (tower + projector) if first else 0
    trained_front = (projector + (tower if work.train_tower else 0)) if first else 0
    if work.method == "full":
        return split + front, split + trained_front
    adapters = lora_parameters(spec, work.lora_rank, work.lora_targets) * layers / spec.layers
    # Of the two matrices of an adapter one follows the split of its base and one is whole on every rank.
    adapters *= (1 + 1 / plan.tp) / 2
    extra = tables / plan.tp if work.train_embeddings else 0
    # PEFT trains a copy of the tables and keeps the frozen ones beside it (modules_to_save).
    return split + front + adapters + extra, adapters + extra + trained_front


def _states(
    spec: ModelSpec, plan: Plan, work: Workload, software: Software, held: float, trained: float
) -> dict[str, float]:
    """Weights, gradients, optimizer state, casts and buffers of one rank.

    zero1 shares the optimizer state over dp_shard, zero2 the gradients too, zero3 and fsdp2 the weights too
    (arXiv:1910.02054, sections 5 and 6); those gather two layers at a time and make one layer's whole gradient. Beside
    a pipeline all stays whole until the step's end, gradients too.
    """
    compute, shard = COMPUTE_BYTES[work.precision], plan.dp_shard
    whole = plan.sharding in ("zero3", "fsdp2")
    of_optimizer = shard if plan.sharding != "none" else 1
    of_gradients = shard if plan.sharding in ("zero2", "zero3", "fsdp2") and not stays_gathered(plan) else 1
    of_weights = shard if whole else 1
    frozen = held - trained
    layer = spec.layer_parameters / plan.tp
    stored = frozen * frozen_bytes(spec, plan, work, software)
    accumulated = software.accumulated if plan.accumulation > 1 else 0
    terms = {
        "weights": 0.0
        if plan.offload_parameters != "none"
        else software.weight * trained / of_weights + stored,
        # Offloaded optimizers take each gradient to the host as it is reduced; a bucket of them stays here.
        "gradients": 0.0
        if plan.offload != "none"
        else (software.gradient + accumulated) * trained / of_gradients,
        "optimizer": 0.0
        if plan.offload != "none"
        else (software.moments + software.master) * trained / of_optimizer,
    }
    # Autocast keeps its half-precision copy of every trained matrix from the forward to the backward pass; sharded
    # weights are cast when they are gathered.
    tables = 0 if spec.tied_embeddings else spec.embedding_parameters / plan.tp
    cast = software.cast if compute < FLOAT32 else 0
    if plan.activation_checkpointing != "none":
        cast = 0  # what a recomputed layer casts is freed with it
    if not whole:
        terms["casts"] = cast * (max(trained - tables, 0) if work.method == "full" else trained)
    elif stays_gathered(plan):
        terms["gathered"] = held * gathered_bytes(work, software)
    else:
        terms["gathered"] = _gathered(spec, plan, work, software, layer, tables)
    if work.method == "qlora":
        terms["dequantised"] = max(d_in * d_out for _, d_in, d_out in spec.linear_shapes) * compute / plan.tp
    terms["buckets"] = _buckets(plan, work, software, trained)
    return terms


def _buckets(plan: Plan, work: Workload, software: Software, trained: float) -> float:
    """What gradients are sent from. DDP's are as large as the gradients, and beside them while accumulating without
    sync; PowerSGD keeps what its factors left out for the next step.
    """
    if is_ddp(plan):
        left_out = FLOAT32 if work.communication_hook == "powersgd" else 0
        return (software.bucket + left_out) * trained
    if plan.sharding in ("zero1", "zero2", "zero3") and (plan.dp_shard > 1 or plan.offload != "none"):
        return min(2.0 * trained, software.zero_bucket) * 2
    return 0.0


def _gathered(
    spec: ModelSpec, plan: Plan, work: Workload, software: Software, layer: float, tables: float
) -> float:
    """What stands whole of sharded weights: two layers, one layer's gradient, and vocabulary tables."""
    compute = COMPUTE_BYTES[work.precision]
    largest = layer if software.whole_tables else max(layer, tables)
    gathered = GATHERED_UNITS * largest * gathered_bytes(work, software)
    if work.method == "full":
        gathered += largest * software.gradient
    if software.whole_tables:
        table = spec.embedding_parameters / plan.tp
        gathered += table * (3 * FLOAT32 + compute if work.method == "full" else compute)
    return gathered


def fixed_bytes(plan: Plan, software: Software = ELASTANE) -> float:
    """CUDA context, library workspaces and communicator buffers, or a CPU process's own memory."""
    if plan.device == "cpu":
        return FIXED_CPU
    return software.context + (FIXED_NCCL if plan.world_size > 1 else 0)


# --- other peaks --------------------------------------------------------------------------------


def save_bytes(spec: ModelSpec, plan: Plan, work: Workload, terms: dict[str, int]) -> int:
    """The peak while a sharded checkpoint is written: all states, no activations, and beside them one gathered layer,
    or with frozen weights what is trained.
    """
    kept = sum(
        terms.get(name, 0) for name in ("weights", "gradients", "optimizer", "casts", "buckets", "fixed")
    )
    beside = spec.layer_parameters / plan.tp if work.method == "full" else trainable_parameters(spec, work)
    return int(kept + beside * FLOAT32)


def evaluation_bytes(
    spec: ModelSpec, plan: Plan, work: Workload, software: Software, terms: dict[str, int], rows: int
) -> int:
    """The peak while `rows` held-out rows are scored at once: weights, one layer's forward pass and the logits."""
    kept = sum(terms.get(name, 0) for name in ("weights", "optimizer", "casts", "gathered", "fixed"))
    compute = COMPUTE_BYTES[work.precision]
    widest = 4 * spec.hidden + 3 * active_ffn(spec)
    logits = (FLOAT32 + compute) * spec.vocab / (plan.tp if software.vocab_parallel else 1)
    return int(kept + rows * work.sequence * (compute * widest / plan.tp + logits))
