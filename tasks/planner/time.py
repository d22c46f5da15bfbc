"""Seconds of one optimizer step by term: what each rank computes, moves and sends."""

from __future__ import annotations

from dataclasses import replace

from tasks.contracts import ModelSpec, Plan
from tasks.optimizers import OPTIMIZERS
from tasks.planner.activations import COMPUTE_BYTES, FLOAT32, hidden_state_bytes
from tasks.planner.compute import head_pass, layer_pass, vision_pass
from tasks.planner.frozen import sent_bytes
from tasks.planner.machine import Machine
from tasks.planner.memory import is_ddp, stage_parameters
from tasks.planner.network import Group, point_to_point, ring_seconds
from tasks.planner.stages import idle, last_rank, rank_layers, stays_gathered
from tasks.planner.workload import ELASTANE, Software, Workload, row_width, software_of
from tasks.planner.zero import gradient_bus, gradient_copies, host_step

CLIP_BYTES = 3 * FLOAT32  # norm and clipping touch the gradient thrice
# What DDP's hooks make of a float32 gradient before it is sent. PowerSGD sends whole gradients in its first steps and
# thin factors later: the careful case is taken.
HOOK_BYTES = {"fp16": 2.0, "bf16": 2.0}


def seconds(
    spec: ModelSpec, plan: Plan, work: Workload, machine: Machine, software: Software = ELASTANE
) -> dict[str, float]:
    """Seconds of one step by term on the slowest stage; every rank works, and the slowest device counts.

    compute and recompute are of all micro-batches, bubble is what the pipeline idles, tensor and pipeline traffic
    is exposed, data-parallel traffic is what does not hide behind computing.
    """
    if machine.device == "cpu":
        machine = replace(machine, peak=machine.peak / plan.world_size)  # ranks of one CPU share its cores
    software = software_of(plan, software)
    width = plan.micro_batch * row_width(work, plan)
    stages = rank_layers(spec, plan, software.stage_split)
    layer = layer_pass(spec, plan, work, machine, software, width)
    head = head_pass(spec, plan, work, machine, software, width)
    vision = vision_pass(spec, plan, work, machine, software)
    totals = []
    for stage, layers in enumerate(stages):
        forward = layers * layer.forward + (head.forward if stage == last_rank(plan) else 0)
        backward = layers * layer.backward + (head.backward if stage == last_rank(plan) else 0)
        if stage == 0:
            forward, backward = forward + vision.forward, backward + vision.backward
        totals.append((forward + backward + layers * layer.again, forward, backward, layers))
    _, forward, backward, layers = max(totals)
    count = plan.accumulation
    mean = sum(total for total, *_ in totals) / plan.pp
    busy = layer.forward + layer.backward + layer.again
    tensor = count * layers * _tensor_traffic(spec, plan, work, machine, software, width, busy)
    terms = {
        "compute": count * (forward + backward),
        "recompute": count * layers * layer.again,
        "tensor_parallel": tensor,
        "pipeline": _pipeline_traffic(spec, plan, work, machine, software, width),
        "bubble": idle(plan) * (mean + tensor / count),
    }
    busy = (forward + backward + layers * layer.again) * count
    terms["communication"] = _data_traffic(spec, plan, work, machine, software, stages, busy)
    terms["optimizer"] = _optimizer(spec, plan, work, machine, software, stages)
    once = machine.constants.step if software.step is None else software.step
    terms["step"] = once if machine.device == "cuda" else 0.0
    return terms


# --- sending ------------------------------------------------------------------------------------


def _tensor_traffic(
    spec: ModelSpec,
    plan: Plan,
    work: Workload,
    machine: Machine,
    software: Software,
    rows: float,
    busy: float,
) -> float:
    """One layer and micro-batch: four all-reduces of s b h (two forward, two backward; arXiv:1909.08053, section 3),
    or as many all-gathers and reduce-scatters of the same bytes with sequence parallelism; two more to recompute.
    """
    if plan.tp == 1:
        return 0.0
    size = rows * spec.hidden * COMPUTE_BYTES[work.precision]
    again = ("selective", "full") if software.native else ("full",)
    times = 6 if plan.activation_checkpointing in again else 4
    sent = times * ring_seconds(machine, Group(plan.tp, 1), size, 2)
    return max(sent, plan.tp * software.host_wait[plan.pp > 1] - busy)


def _pipeline_traffic(
    spec: ModelSpec, plan: Plan, work: Workload, machine: Machine, software: Software, rows: float
) -> float:
    """A step's activations and their gradients to the next stage, once a chunk; and the gradient of a tied table, which
    both ends hold.
    """
    if plan.pp == 1:
        return 0.0
    split = plan.tp if plan.sequence_parallel and not software.native else 1
    size = rows * spec.hidden * hidden_state_bytes(work, software) / split
    across = plan.world_size // plan.pp >= machine.gpus_per_node
    sent = 2 * plan.accumulation * plan.virtual_stages * point_to_point(machine, size, across)
    trained = work.method == "full" or work.train_embeddings
    if spec.tied_embeddings and trained and last_rank(plan) > 0:
        sent += point_to_point(machine, FLOAT32 * spec.embedding_parameters / plan.tp, across)
    return sent


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
    gradients each micro-batch (arXiv:1910.02054, section 7), beside a pipeline once a step; hybrid sharding then
    reduces over the replicas. Gradients that are summed after the last backward pass hide behind nothing: those of
    copies beside tensor or pipeline parallelism, and those that a pipeline's ranks scatter.
    """
    if plan.data_parallel == 1 and plan.sharding == "none":
        return 0.0
    compute = COMPUTE_BYTES[work.precision]
    sent = software.gather or compute
    held, trained = _fullest_end(spec, plan, work, stages)
    inner = Group(plan.dp_shard, plan.tp)
    outer = Group(plan.dp_replicate, plan.tp * plan.dp_shard)
    width = HOOK_BYTES.get(work.communication_hook, software.gradient_traffic)
    gradients = trained * min(software.gradient_traffic, width)
    last = busy / max(1, plan.accumulation) * (2 / 3)
    if plan.replication == "data_parallel":
        # One process scatters the batch, copies the model to every card each micro-batch and sums at card 0.
        return plan.accumulation * 3 * (plan.dp_replicate - 1) * held * compute / (machine.link * 0.5)
    if plan.sharding == "none":
        whole = ring_seconds(machine, outer, gradients, 2)
        return whole - (software.overlap * min(whole, last) if is_ddp(plan) else 0.0)
    if plan.sharding == "zero0":  # summed after the last backward pass
        return ring_seconds(machine, inner, gradients, 2)
    outside = ring_seconds(machine, outer, gradients / plan.dp_shard, 2)
    if plan.sharding in ("zero1", "zero2"):
        scattered = ring_seconds(machine, inner, gradients, software.gradient_trips)
        if plan.sharding == "zero2":
            scattered *= plan.accumulation
        scattered += gradient_bus(plan, machine, software, trained)
        hidden = software.overlap * min(scattered, last)
        return scattered - hidden + ring_seconds(machine, inner, trained * sent, 1) + outside
    weights = held * sent_bytes(work, software)
    once = ring_seconds(machine, inner, weights, 1)
    if stays_gathered(plan):
        exposed = once - software.overlap * min(once, last / 2)
        return exposed + ring_seconds(machine, inner, gradients, 1) + outside
    extra = (2 * once + ring_seconds(machine, inner, trained * sent, 1)) * plan.accumulation
    extra += gradient_bus(plan, machine, software, trained)
    if plan.offload_parameters != "none":
        extra += plan.accumulation * 2 * weights / plan.dp_shard / machine.host_link
    if plan.offload_parameters == "nvme":
        here = min(plan.world_size, machine.gpus_per_node)
        extra += plan.accumulation * 2 * here * weights / plan.dp_shard / machine.disk
    slowed = machine.constants.contention * min(extra, busy)
    return extra - software.overlap * min(extra, busy) + slowed + outside


def _fullest_end(spec: ModelSpec, plan: Plan, work: Workload, stages: tuple[int, ...]) -> tuple[float, float]:
    """Parameters of the pipeline's first or last rank, whichever has more: (all, trained)."""
    ends = {rank: stages[rank] for rank in (0, plan.pp - 1)}
    sizes = [stage_parameters(spec, plan, work, rank, layers) for rank, layers in ends.items()]
    return max(held for held, _ in sizes), max(trained for _, trained in sizes)


def _optimizer(
    spec: ModelSpec, plan: Plan, work: Workload, machine: Machine, software: Software, stages: tuple[int, ...]
) -> float:
    """On the GPU it is bound by its memory; offloaded, see `host_step`."""
    needs = OPTIMIZERS[work.optim]
    _, trained = stage_parameters(spec, plan, work, 0, stages[0])
    copied = gradient_copies(plan, software, trained)
    if plan.sharding not in ("none", "zero0"):
        trained /= plan.dp_shard
    if plan.offload == "none":
        share = machine.constants.bandwidth if machine.device == "cuda" else 1.0
        return (trained * (needs.moved + CLIP_BYTES) + copied) / (machine.bandwidth * share)
    return host_step(plan, machine, needs, trained)
