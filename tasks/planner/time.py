"""Seconds of one optimizer step by term: what each rank computes, moves and sends."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tasks.contracts import ModelSpec, Plan
from tasks.planner.machine import FLOAT32_MATMUL, Machine
from tasks.planner.memory import COMPUTE_BYTES, FLOAT32, NF4_BYTES, stage_parameters
from tasks.planner.model_spec import active_parameters, lora_shapes
from tasks.planner.network import Group, point_to_point, ring_seconds
from tasks.planner.stages import stage_layers
from tasks.planner.workload import ELASTANE, Software, Workload

# AdamW reads weight, gradient and two moments and writes three; norm and clipping touch the gradient thrice.
OPTIMIZER_BYTES = (4 + 3 + 3) * FLOAT32
# CPU Adam moves the same states through host memory, and the half-precision weights back.
HOST_OPTIMIZER_BYTES = 4 * FLOAT32 + 3 * FLOAT32
# Efficiency of a micro-batch of t tokens on a CPU is t / (t + 24): 0.95 at some 460 tokens (measured: 100 to 500).
CPU_ROWS = 24.0
ATTENTION_BACKWARD = 2.5  # FlashAttention-2, arXiv:2307.08691, section 4.1


@dataclass(frozen=True)
class Pass:
    """Seconds of one micro-batch in one decoder layer or head: forward, backward and what recomputation repeats."""

    forward: float
    backward: float
    again: float


def seconds(
    spec: ModelSpec, plan: Plan, work: Workload, machine: Machine, software: Software = ELASTANE
) -> dict[str, float]:
    """Seconds of one step by term on the slowest stage; every rank works, and the slowest device counts.

    compute and recompute are of all micro-batches, bubble is what the pipeline idles, tensor and pipeline traffic
    is exposed, data-parallel traffic is what does not hide behind computing.
    """
    width = plan.micro_batch * (work.sequence if work.padded else work.mean_row)
    stages = stage_layers(spec, plan.pp, software.stage_split)
    layer = _layer(spec, plan, work, machine, software, width)
    head = _head(spec, plan, work, machine, software, width)
    vision = _vision(spec, plan, work, machine)
    totals = []
    for stage, layers in enumerate(stages):
        forward = layers * layer.forward + (head.forward if stage == plan.pp - 1 else 0)
        backward = layers * layer.backward + (head.backward if stage == plan.pp - 1 else 0)
        if stage == 0:
            forward, backward = forward + vision.forward, backward + vision.backward
        totals.append((forward + backward + layers * layer.again, forward, backward, layers))
    slowest, forward, backward, layers = max(totals)
    count = plan.accumulation
    mean = sum(total for total, *_ in totals) / plan.pp
    tensor = count * layers * _tensor_traffic(spec, plan, work, machine, width)
    terms = {
        "compute": count * (forward + backward),
        "recompute": count * layers * layer.again,
        "tensor_parallel": tensor,
        "pipeline": count * _pipeline_traffic(spec, plan, work, machine, width),
        "bubble": _bubble(plan, slowest, mean, tensor / count),
    }
    busy = (forward + backward + layers * layer.again) * count
    terms["communication"] = _data_traffic(spec, plan, work, machine, software, stages, busy)
    terms["optimizer"] = _optimizer(spec, plan, work, machine, software, stages)
    terms["step"] = machine.constants.step if machine.device == "cuda" else 0.0
    return terms


# --- computing ----------------------------------------------------------------------------------


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
    best = FLOAT32_MATMUL if single else c.matmul
    share = best * rows / (rows + c.rows) * d_out / (d_out + c.width) * d_in / (d_in + c.width)
    moved = width * (rows * d_in + d_in * d_out + rows * d_out)
    return max(flops / (machine.peak * share), moved / (machine.bandwidth * c.bandwidth))


def _layer(
    spec: ModelSpec, plan: Plan, work: Workload, machine: Machine, software: Software, rows: float
) -> Pass:
    compute = COMPUTE_BYTES[work.precision]
    single = work.precision == "float32"
    linear = _linear_seconds(spec, plan.tp, machine, rows, compute, single)
    adapters = _adapter_seconds(spec, plan.tp, work, machine, rows, compute)
    attention = attention_seconds(spec, plan.tp, machine, rows, work, software)
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
        launch = software.launch if work.method == "full" else software.lora_launch
    own = 2.0 if work.method == "full" else 1.0  # frozen weights need no gradient of their own
    forward = max(linear + adapters + attention + moved + dequantise, launch)
    backward = own * linear + 2 * adapters + ATTENTION_BACKWARD * attention + 2 * moved + dequantise
    backward = max(backward, 2 * launch)
    again = {"none": 0.0, "selective": moved + 0.1 * linear, "full": forward}[plan.activation_checkpointing]
    return Pass(forward, backward, again)


def _linear_seconds(
    spec: ModelSpec, tp: int, machine: Machine, rows: float, compute: int, single: bool
) -> float:
    total = 0.0
    for name, d_in, d_out in spec.linear_shapes:
        down = name.endswith(("o_proj", "down_proj", "dense", "dense_4h_to_h", "c_proj"))
        share_in, share_out = (tp, 1) if down else (1, tp)
        total += matmul_seconds(machine, rows, d_in / share_in, d_out / share_out, compute, single)
    if spec.moe is not None:
        ratio = 1 - spec.moe.dense_layers / spec.layers
        per_expert = max(1.0, rows * spec.moe.active / spec.moe.experts)
        one = matmul_seconds(machine, per_expert, spec.hidden, spec.moe.ffn / tp, compute, single)
        total += ratio * 3 * one * spec.moe.experts
    return total


def _adapter_seconds(
    spec: ModelSpec, tp: int, work: Workload, machine: Machine, rows: float, compute: int
) -> float:
    """Adapters are thin and so bound by memory: input read, rank-wide and output written, added once more."""
    if work.method == "full":
        return 0.0
    shapes = lora_shapes(spec, work.lora_targets)
    if machine.device == "cpu":
        return sum(2.0 * rows * work.lora_rank * (i + o) for _, i, o in shapes) / machine.peak
    moved = sum(rows * compute * (d_in + 3 * d_out + 2 * work.lora_rank) for _, d_in, d_out in shapes)
    return moved / tp / (machine.bandwidth * machine.constants.bandwidth)


def attention_seconds(
    spec: ModelSpec, tp: int, machine: Machine, rows: float, work: Workload, software: Software
) -> float:
    """Causal scores and values of one layer: 2 s q FLOPs a token (half of 4 s q), and score traffic where kept."""
    row = work.sequence if work.padded else work.mean_row
    flops = 2.0 * rows * row * spec.heads * spec.head_dim / tp
    if machine.device == "cpu":
        return flops / machine.peak
    c = machine.constants
    taken = flops / (machine.peak * (c.attention if work.precision != "float32" else 0.3))
    if software.scores:
        scores = rows * row * spec.heads / tp
        # Not flash: the whole square is computed, and scores are written and read by softmax and mask.
        taken = 2 * flops / (machine.peak * c.matmul * 0.7) + scores * 2.5 * software.scores / (
            machine.bandwidth * c.bandwidth
        )
    return taken


def _head(
    spec: ModelSpec, plan: Plan, work: Workload, machine: Machine, software: Software, rows: float
) -> Pass:
    """The output head and the loss: a matmul, and some 20 bytes a logit moved each way."""
    compute = COMPUTE_BYTES[work.precision]
    share = plan.tp if software.vocab_parallel else 1
    product = matmul_seconds(
        machine, rows, spec.hidden, spec.vocab / share, compute, work.precision == "float32"
    )
    loss = 0.0
    if machine.device == "cuda":
        loss = rows * spec.vocab / share * 10 / (machine.bandwidth * machine.constants.bandwidth)
    own = 2.0 if work.method == "full" or work.train_embeddings else 1.0
    return Pass(product + loss, own * product + loss, 0.0)


def _vision(spec: ModelSpec, plan: Plan, work: Workload, machine: Machine) -> Pass:
    """Tower and projector: 2N FLOPs a patch forward; backward only through what is trained."""
    if spec.vision is None or not work.tiles:
        return Pass(0.0, 0.0, 0.0)
    patches = plan.micro_batch * work.tiles * spec.vision.patches
    best = machine.constants.matmul * 0.8 if machine.device == "cuda" else 1.0
    tower = 2.0 * spec.vision.tower_parameters * patches / (machine.peak * best)
    projector = 2.0 * spec.vision.projector_parameters * patches / (machine.peak * best)
    return Pass(tower + projector, 2 * projector + (2 * tower if work.train_tower else 0.0), 0.0)


# --- sending ------------------------------------------------------------------------------------


def _tensor_traffic(spec: ModelSpec, plan: Plan, work: Workload, machine: Machine, rows: float) -> float:
    """One layer and micro-batch: four all-reduces of s b h (two forward, two backward; arXiv:1909.08053, section 3),
    or as many all-gathers and reduce-scatters of the same bytes with sequence parallelism; two more to recompute.
    """
    if plan.tp == 1:
        return 0.0
    size = rows * spec.hidden * COMPUTE_BYTES[work.precision]
    times = 6 if plan.activation_checkpointing == "full" else 4
    return times * ring_seconds(machine, Group(plan.tp, 1), size, 2)


def _pipeline_traffic(spec: ModelSpec, plan: Plan, work: Workload, machine: Machine, rows: float) -> float:
    """Activations and their gradients to the next stage, once a chunk."""
    if plan.pp == 1:
        return 0.0
    split = plan.tp if plan.sequence_parallel else 1
    size = rows * spec.hidden * COMPUTE_BYTES[work.precision] / split
    across = plan.world_size // plan.pp >= machine.gpus_per_node
    return 2 * plan.virtual_stages * point_to_point(machine, size, across)


def _bubble(plan: Plan, slowest: float, mean: float, tensor: float) -> float:
    """Idle time of a pipeline: (p-1) micro-batches with GPipe and 1F1B, 1/v of it interleaved, about a third with
    zero-bubble (arXiv:2104.04473, section 2.2; arXiv:2401.10241, section 2).
    """
    if plan.pp == 1:
        return 0.0
    part = {"interleaved1f1b": 1 / plan.virtual_stages, "zerobubble": 1 / 3}.get(plan.schedule, 1.0)
    return (plan.pp - 1) * (mean + tensor) * part


def _data_traffic(
    spec: ModelSpec,
    plan: Plan,
    work: Workload,
    machine: Machine,
    software: Software,
    stages: tuple[int, ...],
    busy: float,
) -> float:
    """What of the data-parallel traffic does not hide behind computing.

    Gradients once a step: an all-reduce, or with shared optimizer state a reduce-scatter and an all-gather of
    weights. fsdp2 and zero3 gather the weights of a layer forward and backward each micro-batch and scatter
    gradients each micro-batch (arXiv:1910.02054, section 7); hybrid sharding then reduces over the replicas.
    """
    if plan.data_parallel == 1 and plan.sharding == "none":
        return 0.0
    compute = COMPUTE_BYTES[work.precision]
    layers = stages[0]
    held, trained = stage_parameters(spec, plan, work, 0, layers)
    if plan.pp > 1:
        last_held, last_trained = stage_parameters(spec, plan, work, plan.pp - 1, stages[-1])
        held, trained = max(held, last_held), max(trained, last_trained)
    inner = Group(plan.dp_shard, plan.tp)
    outer = Group(plan.dp_replicate, plan.tp * plan.dp_shard)
    gradients = trained * software.gradient_traffic
    last = busy / max(1, plan.accumulation) * (2 / 3)
    if plan.replication == "data_parallel":
        # One process scatters the batch, copies the model to every card each micro-batch and sums at card 0.
        return plan.accumulation * 3 * (plan.dp_replicate - 1) * held * compute / (machine.link * 0.5)
    if plan.sharding == "none":
        whole = ring_seconds(machine, outer, gradients, 2)
        return whole - software.overlap * min(whole, last)
    outside = ring_seconds(machine, outer, gradients / plan.dp_shard, 2)
    if plan.sharding in ("zero1", "zero2"):
        scattered = ring_seconds(machine, inner, gradients, 1)
        if plan.sharding == "zero2":
            scattered *= plan.accumulation
        hidden = software.overlap * min(scattered, last)
        return scattered - hidden + ring_seconds(machine, inner, trained * compute, 1) + outside
    weights = held * (NF4_BYTES if work.method == "qlora" else compute)
    each = 2 * ring_seconds(machine, inner, weights, 1) + ring_seconds(machine, inner, trained * compute, 1)
    extra = each * plan.accumulation
    if plan.offload_parameters != "none":
        extra += plan.accumulation * 2 * weights / plan.dp_shard / machine.host_link
    slowed = machine.constants.contention * min(extra, busy)
    return extra - software.overlap * min(extra, busy) + slowed + outside


def _optimizer(
    spec: ModelSpec, plan: Plan, work: Workload, machine: Machine, software: Software, stages: tuple[int, ...]
) -> float:
    """AdamW on the GPU is bound by its memory; offloaded, by the bus both ways and by host memory or disk."""
    _, trained = stage_parameters(spec, plan, work, 0, stages[0])
    if plan.sharding != "none":
        trained /= plan.dp_shard
    if plan.offload == "none":
        share = machine.constants.bandwidth if machine.device == "cuda" else 1.0
        return trained * OPTIMIZER_BYTES / (machine.bandwidth * share)
    here = min(plan.world_size, machine.gpus_per_node)
    compute = COMPUTE_BYTES[work.precision]
    bus = trained * (software.gradient_traffic + compute) / machine.host_link
    host = here * trained * HOST_OPTIMIZER_BYTES / machine.host_bandwidth
    disk = here * trained * 6 * FLOAT32 / machine.disk if plan.offload == "nvme" else 0.0
    return bus + max(host, disk)


# --- FLOPs --------------------------------------------------------------------------------------


def model_flops(spec: ModelSpec, work: Workload) -> float:
    """Model FLOPs of an average row without recomputation: 6N a token for full tuning (4N with frozen weights), and
    causal attention 3.5 x 2 s q a layer and token (arXiv:2205.05198 appendix A counts 3 x 4 s q, not causal).
    """
    active = active_parameters(spec)
    factor = 6.0 if work.method == "full" else 4.0
    attention = (1 + ATTENTION_BACKWARD) * 2.0 * work.mean_row * spec.heads * spec.head_dim * spec.layers
    vision = 0.0
    if spec.vision is not None:
        per_patch = 2.0 * spec.vision.tower_parameters * (3 if work.train_tower else 1)
        vision = work.tiles * spec.vision.patches * (per_patch + 6.0 * spec.vision.projector_parameters)
    return work.mean_row * (factor * active + attention) + vision
