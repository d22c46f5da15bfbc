"""Seconds a rank computes for one micro-batch: decoder layers, head, vision tower; and the FLOPs a row needs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tasks.contracts import ModelSpec, Plan
from tasks.planner.activations import COMPUTE_BYTES, ROWWISE, fuses_loss
from tasks.planner.machine import FLOAT32_MATMUL, Machine
from tasks.planner.model_spec import active_parameters, lora_shapes
from tasks.planner.stages import stays_gathered
from tasks.planner.workload import ELASTANE, NF4_BYTES, Software, Workload, uses_block_mask

# Efficiency of a micro-batch of t tokens on a CPU is t / (t + 100): LoRA of the built-in model on 2 cores trained 162,
# 182 and 216 tokens/s in micro-batches of 2, 4 and 8 rows of 73 tokens (measured).
CPU_ROWS = 100.0
ATTENTION_BACKWARD = 2.5  # FlashAttention-2, arXiv:2307.08691, section 4.1


@dataclass(frozen=True)
class Pass:
    """Seconds of one micro-batch in one decoder layer or head: forward, backward and what recomputation repeats."""

    forward: float
    backward: float
    again: float


@lru_cache(maxsize=65536)
def matmul_seconds(
    machine: Machine, rows: float, d_in: float, d_out: float, width: int, single: bool
) -> float:
    """One product of rows x d_in by d_in x d_out: the larger of arithmetic and memory time.

    The reached share of the peak falls for thin shapes, see `Calibration`. `width` is bytes an entry.
    """
    flops = 2.0 * rows * d_in * d_out
    if machine.device == "cpu":
        return flops / (machine.peak * rows / (rows + CPU_ROWS))
    c = machine.constants
    share = (
        FLOAT32_MATMUL
        if single
        else c.matmul * rows / (rows + c.rows) * d_out / (d_out + c.width) * d_in / (d_in + c.width)
    )
    moved = width * (rows * d_in + d_in * d_out + rows * d_out)
    return max(flops / (machine.peak * share), moved / (machine.bandwidth * c.bandwidth))


def layer_pass(
    spec: ModelSpec, plan: Plan, work: Workload, machine: Machine, software: Software, rows: float
) -> Pass:
    compute = COMPUTE_BYTES[work.precision]
    single = work.precision == "float32"
    linear = _linear_seconds(spec, plan.tp, machine, rows, compute, single)
    adapters = _adapter_seconds(spec, plan.tp, work, machine, software, rows, compute)
    attention = attention_seconds(spec, plan, machine, rows, work, software)
    c = machine.constants
    per_token = software.elementwise[0] * spec.hidden + software.elementwise[1] * spec.ffn / plan.tp
    divided = plan.tp if plan.sequence_parallel else min(plan.tp, 2)
    moved = rows * per_token * compute / 2 / (machine.bandwidth * c.bandwidth)
    moved = moved / divided if machine.device == "cuda" else 0.0
    dequantise = 0.0
    if work.method == "qlora":
        weights = sum(d_in * d_out for _, d_in, d_out in spec.linear_shapes) / plan.tp
        dequantise = weights * (NF4_BYTES + 2 * compute) / (machine.bandwidth * c.bandwidth) * 2
    launch = 0.0
    if machine.device == "cuda":
        adapters_of_layer = 0 if work.method == "full" else len(lora_shapes(spec, work.lora_targets))
        launch = software.launch + software.adapter_launch * adapters_of_layer
        if work.method == "qlora":
            launch += software.four_bit_launch * len(spec.linear_shapes)
        if plan.sharding in ("zero3", "fsdp2") and not stays_gathered(plan):
            launch += software.gather_launch
        if plan.sharding in ("zero1", "zero2"):
            launch += software.hook_launch
        if plan.tp > 1:
            launch += software.cut_launch
    own = 2.0 if work.method == "full" else 1.0  # frozen weights need no gradient of their own
    forward = max(linear + adapters + attention + moved + dequantise, launch)
    backward = own * linear + 2 * adapters + ATTENTION_BACKWARD * attention + 2 * moved + dequantise
    # Zero-bubble goes through the backward pass twice, for inputs and for weights: assumed half as dear again.
    backward = max(backward, (3 if plan.schedule == "zerobubble" else 2) * launch)
    again = {"none": 0.0, "selective": moved + 0.1 * linear, "full": forward}[plan.activation_checkpointing]
    return Pass(forward, backward, again)


def _linear_seconds(
    spec: ModelSpec, tp: int, machine: Machine, rows: float, compute: int, single: bool
) -> float:
    total = 0.0
    for name, d_in, d_out in spec.linear_shapes:
        down = name.endswith(ROWWISE)
        share_in, share_out = (tp, 1) if down else (1, tp)
        total += matmul_seconds(machine, rows, d_in / share_in, d_out / share_out, compute, single)
    if spec.moe is not None:
        ratio = 1 - spec.moe.dense_layers / spec.layers
        per_expert = max(1.0, rows * spec.moe.active / spec.moe.experts)
        one = matmul_seconds(machine, per_expert, spec.hidden, spec.moe.ffn / tp, compute, single)
        total += ratio * 3 * one * spec.moe.experts
    return total


def _adapter_seconds(
    spec: ModelSpec, tp: int, work: Workload, machine: Machine, software: Software, rows: float, compute: int
) -> float:
    """Adapters are thin and so bound by memory: input read, rank-wide and output written, added once more."""
    if work.method == "full":
        return 0.0
    shapes = lora_shapes(spec, work.lora_targets)
    if machine.device == "cpu":
        return sum(2.0 * rows * work.lora_rank * (i + o) for _, i, o in shapes) / machine.peak
    moved = sum(rows * compute * (d_in + 3 * d_out + 2 * work.lora_rank) for _, d_in, d_out in shapes)
    return software.adapter_traffic * moved / tp / (machine.bandwidth * machine.constants.bandwidth)


def attention_seconds(
    spec: ModelSpec, plan: Plan, machine: Machine, rows: float, work: Workload, software: Software
) -> float:
    """Causal scores and values of one layer: 2 s q FLOPs a token (half of 4 s q), and score traffic where kept.

    s is the length of a row, or of a document where packed ones are not masked but computed alone.
    """
    row = rows / plan.micro_batch
    flops = 2.0 * rows * row * spec.heads * spec.head_dim / plan.tp
    if work.attended is not None:
        masked = uses_block_mask(work, machine.device)
        flops *= 2.0 if masked else min(1.0, work.attended / row)
    if machine.device == "cpu":
        return flops / machine.peak
    c = machine.constants
    reached = c.attention if software.attention is None else software.attention
    taken = flops / (machine.peak * (reached if work.precision != "float32" else 0.3))
    if software.scores:
        scores = rows * row * spec.heads / plan.tp
        # Not flash: the whole square is computed, and scores are written and read by softmax and mask.
        taken = 2 * flops / (machine.peak * c.matmul * 0.7) + scores * 2.5 * software.scores / (
            machine.bandwidth * c.bandwidth
        )
    return taken


def head_pass(
    spec: ModelSpec, plan: Plan, work: Workload, machine: Machine, software: Software, rows: float
) -> Pass:
    """The output head and the loss: a matmul, and some 10 bytes a logit moved each way; fused, it reads logits, and
    going back reads them again and writes their gradient.
    """
    compute = COMPUTE_BYTES[work.precision]
    share = plan.tp if software.vocab_parallel else 1
    product = matmul_seconds(
        machine, rows, spec.hidden, spec.vocab / share, compute, work.precision == "float32"
    )
    forth, back = (compute, 2 * compute) if fuses_loss(plan, software) else (10, 10)
    a_byte = 0.0
    if machine.device == "cuda":
        a_byte = rows * spec.vocab / share / (machine.bandwidth * machine.constants.bandwidth)
    own = 2.0 if work.method == "full" or work.train_embeddings else 1.0
    return Pass(product + forth * a_byte, own * product + back * a_byte, 0.0)


def vision_pass(
    spec: ModelSpec, plan: Plan, work: Workload, machine: Machine, software: Software = ELASTANE
) -> Pass:
    """Tower and projector: 2N FLOPs a patch forward, and attention among a tile's patches (4 x patches x hidden a
    patch and layer); backward only through what is trained. A tower's layer cannot be launched faster than a decoder's.
    """
    if spec.vision is None or not work.tiles:
        return Pass(0.0, 0.0, 0.0)
    patches = plan.micro_batch * work.tiles * spec.vision.patches
    best = machine.constants.matmul * 0.8 if machine.device == "cuda" else 1.0
    tower = 2.0 * spec.vision.tower_parameters * patches / (machine.peak * best)
    scores = 4.0 * patches * spec.vision.patches * spec.vision.hidden * spec.vision.feature_layers
    if machine.device == "cuda":
        tower += scores / (machine.peak * machine.constants.attention)
        tower = max(tower, spec.vision.feature_layers * software.launch)
    else:
        tower += scores / machine.peak
    projector = 2.0 * spec.vision.projector_parameters * patches / (machine.peak * best)
    return Pass(tower + projector, 2 * projector + (2 * tower if work.train_tower else 0.0), 0.0)


def model_flops(spec: ModelSpec, work: Workload) -> float:
    """Model FLOPs of an average row without recomputation: 6N a token for full tuning (4N with frozen weights), and
    causal attention 3.5 x 2 s q a layer and token (arXiv:2205.05198 appendix A counts 3 x 4 s q, not causal).
    """
    active = active_parameters(spec)
    factor = 6.0 if work.method == "full" else 4.0
    within = work.mean_row if work.attended is None else min(work.attended, work.mean_row)
    attention = (1 + ATTENTION_BACKWARD) * 2.0 * within * spec.heads * spec.head_dim * spec.layers
    vision = 0.0
    if spec.vision is not None:
        per_patch = 2.0 * spec.vision.tower_parameters * (3 if work.train_tower else 1)
        vision = work.tiles * spec.vision.patches * (per_patch + 6.0 * spec.vision.projector_parameters)
    return work.mean_row * (factor * active + attention) + vision
