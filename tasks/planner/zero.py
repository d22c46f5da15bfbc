"""ZeRO as the engine deepspeed runs it: what a GPU and a node's host memory hold, and what offload moves.

Read off DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, stage3.py, partition_parameters.py). The sizes of its buckets
are counted here and told to it by tasks/trainer/zero_config.py.
"""

from __future__ import annotations

from math import ceil, log2

from tasks.contracts import ModelSpec, Plan
from tasks.optimizers import Needs
from tasks.planner.activations import COMPUTE_BYTES, FLOAT32
from tasks.planner.frozen import frozen_bytes
from tasks.planner.machine import Machine
from tasks.planner.model_spec import lora_parameters
from tasks.planner.workload import Software, Workload

# Elements of a bucket that gradients are reduced from. DeepSpeed's own (500 million a bucket, a billion gathered) take
# 4 to 8 GB in float32; these fill a link too. A matrix larger than a bucket is sent by itself.
BUCKET = 50_000_000
# Elements that ZeRO-3 gathers ahead at most, by where parameters are kept: a layer of a 7 B model is more than the
# smaller number, so it is fetched late. On two H200 a step of Qwen2.5-7B took 3.6 s with the larger one, and 5.9 s.
LIVE = {"none": 1_000_000_000, "cpu": 200_000_000, "nvme": 200_000_000}
# Elements that ZeRO-3's optimizer is given at once. On a GPU it has a second flat gradient, on disk it passes through
# buffers of this size; in host memory each has a pinned one, and these are rounded up to a power of two: here 2**30
# elements.
SUB_GROUP = {"none": 100_000_000, "cpu": 900_000_000, "nvme": 100_000_000}
SWAP_BUFFERS = 5  # of a sub-group each: Adam's four states and one more
PARAMETER_BUFFER = (
    600_000_000  # elements, of all ranks together: a model's largest matrix comes from disk through it
)
PARAMETER_BUFFERS = 5 * PARAMETER_BUFFER * FLOAT32  # bytes a node
IN_HOST = 1_000_000_000 * FLOAT32  # bytes a rank of the parameters kept on disk that stay in host memory
FLAT_ALL_REDUCE = 500_000_000  # elements that ZeRO-0 joins to one all-reduce
# Beside the optimizer on the host: before it gradients are looked through for infinities and NaN (twice, with a byte an
# element) and clipped, after it weights are copied to be sent.
HOST_COPY_BYTES = 2 * (FLOAT32 + 2) + 2 * FLOAT32 + 2 * FLOAT32
# On disk are weights, moments and gradients, and each is read and written once a step.
DISK_STEP_BYTES = 2 * (FLOAT32 + FLOAT32)


def zero_states(
    spec: ModelSpec, plan: Plan, work: Workload, software: Software, held: float, trained: float
) -> dict[str, float]:
    """Weights, gradients, optimizer state, casts and buffers of one GPU.

    ZeRO-1 and 2 keep float32 weights whole, ZeRO-3 this rank's part; beside them each has a float32 copy of that part,
    which the optimizer moves and which is counted with it (DeepSpeed means to share it under ZeRO-3, and compares a
    device with a name). A rank's reduced gradients stand twice at the step of ZeRO-1 and 2, as they were summed and
    flat; ZeRO-1 has all of them whole before the last micro-batch. A cast that autocast makes of a gathered matrix is
    saved for the backward pass like any other.
    """
    third, away = plan.sharding == "zero3", plan.offload != "none"
    own = trained / (1 if plan.sharding == "zero0" else plan.dp_shard)
    frozen = (held - trained) * frozen_bytes(spec, plan, work, software)
    reduced = FLOAT32 * (own if third else 2 * own)
    if plan.sharding == "zero0" or (plan.sharding == "zero1" and plan.accumulation > 1):
        reduced = max(reduced if plan.sharding == "zero1" else 0.0, FLOAT32 * trained)
    masters = 0 if plan.sharding == "zero0" else FLOAT32
    kept = 0.0 if plan.offload_parameters != "none" else FLOAT32 * (own if third else trained) + frozen
    if third and work.method == "lora":
        # Parameters of up to 100,000 numbers, as adapters are, stay whole beside their shares.
        kept += FLOAT32 * min(trained, lora_parameters(spec, work.lora_rank, work.lora_targets))
    terms = {
        "weights": kept,
        "gradients": 0.0 if away else reduced,
        "optimizer": 0.0 if away else (software.moments + masters) * own,
        "buckets": _buckets(spec, plan, trained),
    }
    half = COMPUTE_BYTES[work.precision] < FLOAT32
    if half and plan.activation_checkpointing == "none":
        tables = 0 if spec.tied_embeddings or work.method != "full" else spec.embedding_parameters
        terms["casts"] = software.cast * max(trained - tables, 0)
    if third:
        terms["gathered"] = _gathered(spec, plan, work, software, held, half)
    return terms


def largest_parameter(spec: ModelSpec) -> int:
    """Elements of the model's largest matrix."""
    return max(spec.embedding_parameters, *(d_in * d_out for _, d_in, d_out in spec.linear_shapes))


def _gathered(
    spec: ModelSpec, plan: Plan, work: Workload, software: Software, held: float, half: bool
) -> float:
    """What stands whole at once: what is gathered ahead, the largest matrix, and in full tuning its gradient and the
    copy of it that is scattered; beside recomputing also the casts of one layer.
    """
    largest = largest_parameter(spec)
    full = work.method == "full"
    width = FLOAT32 if full else COMPUTE_BYTES[work.precision]
    gathered = min(held, LIVE[plan.offload_parameters] + largest) * width
    if full:
        gathered += 2 * FLOAT32 * largest
        if half and plan.activation_checkpointing != "none":
            gathered += software.cast * spec.layer_parameters
    return gathered


def _buckets(spec: ModelSpec, plan: Plan, trained: float) -> float:
    """Buckets are made at full size. ZeRO-1 and 2 fill one while the other is sent; ZeRO-3 scatters from a copy."""
    if plan.sharding == "zero0":
        return FLOAT32 * min(trained, FLAT_ALL_REDUCE) if plan.data_parallel > 1 else 0.0
    on_gpu = plan.device == "cuda"
    size = BUCKET if on_gpu else min(trained, BUCKET)
    found = FLOAT32 * size * (2 if on_gpu or plan.sharding == "zero3" else 1)
    if plan.offload != "none" and plan.sharding != "zero3":
        found += FLOAT32 * min(trained, largest_parameter(spec))
    return found


# --- host memory --------------------------------------------------------------------------------


def zero_host(
    spec: ModelSpec, plan: Plan, moments: float, trained: float, frozen: float, here: int
) -> dict[str, float]:
    """Bytes of host memory of one node that offload takes, by term; `here` ranks are on it.

    Args:
        moments: bytes of optimizer state a trained parameter.
        trained: parameters that are trained, of the whole model.
        frozen: bytes of those that are not.
    """
    own = trained / plan.dp_shard
    third, buffers = plan.sharding == "zero3", pinned(FLOAT32 * own)
    group = pinned(FLOAT32 * own, FLOAT32 * SUB_GROUP[plan.offload])
    terms: dict[str, float] = {}
    if plan.offload == "cpu":
        # Moments are plain memory. ZeRO-3 sums gradients in one buffer and copies them into those of the sub-groups;
        # ZeRO-2 sums them parameter by parameter, and sends weights back from a buffer of their own.
        terms["optimizer"] = here * (moments * own + (FLOAT32 * own if third else buffers))
        sums = buffers + group if third else 2 * buffers + (buffers if plan.accumulation > 1 else 0)
        terms["gradients"] = here * sums
    elif plan.offload == "nvme":
        terms["optimizer"] = here * SWAP_BUFFERS * min(group, pinned(FLOAT32 * SUB_GROUP["nvme"]))
        terms["gradients"] = here * buffers
    if plan.offload_parameters != "none":
        cpu = here * (buffers + pinned(frozen / plan.dp_shard))
        on_disk = PARAMETER_BUFFERS + here * min(IN_HOST, buffers)
        terms["weights"] = cpu if plan.offload_parameters == "cpu" else min(cpu, on_disk)
    return terms


def pinned(size: float, piece: float = float("inf")) -> float:
    """Bytes that torch's allocator takes for pinned memory of `size` in pieces, each rounded up to a power of two."""
    if size <= 0:
        return 0.0
    whole, rest = divmod(size, piece) if size > piece else (0.0, size)
    return float(whole * 2 ** ceil(log2(piece)) if whole else 0.0) + (
        2.0 ** ceil(log2(rest)) if rest else 0.0
    )


# --- time ---------------------------------------------------------------------------------------


def gradient_copies(plan: Plan, software: Software, trained: float) -> float:
    """Bytes a step of memory traffic beside AdamW's: gradients are read and written into buckets, and of this rank's
    part out of these, into a flat one, and weights back from the copy that was moved.
    """
    if not software.flat_parts or plan.sharding == "zero0":
        return 0.0
    times = 1 if plan.sharding == "zero1" else plan.accumulation
    return 2 * FLOAT32 * (times * trained + 3 * trained / plan.dp_shard)


def gradient_bus(plan: Plan, machine: Machine, software: Software, trained: float) -> float:
    """Seconds a step that reduced gradients are on their way to host memory: after every micro-batch, where the sum is
    fetched before it is added to and sent back, and once more to where the optimizer reads them.
    """
    if plan.offload == "none" or not software.flat_parts:
        return 0.0
    return trained / plan.dp_shard * FLOAT32 * 2 * plan.accumulation / machine.host_link


def host_step(plan: Plan, machine: Machine, needs: Needs, own: float) -> float:
    """Seconds of an optimizer in host memory on `own` parameters a rank, with disk before and after, and of sending
    weights back unless they live there.
    """
    here = min(plan.world_size, machine.gpus_per_node)
    taken = here * own * (needs.moved + HOST_COPY_BYTES) / machine.host_bandwidth
    if plan.offload_parameters == "none":
        taken += own * FLOAT32 / machine.host_link
    if plan.offload == "nvme":
        taken += here * own * (2 * needs.state + DISK_STEP_BYTES) / machine.disk
    return taken
