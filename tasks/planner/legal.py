"""Which plans are legal: one rule a function, each with a sentence of value, rule and way out."""

from __future__ import annotations

from typing import NamedTuple

from tasks.contracts import Plan
from tasks.planner.four_bit import qlora_is_cut_between_blocks
from tasks.planner.ground import Ground, Rule, divisors, either, tensor_degrees, tensor_widths
from tasks.planner.moments import optimizer_sees_whole_parameters
from tasks.planner.stages import rounds

LEAST_CAPABILITY = (7, 0)  # of GPUs that Triton makes kernels for, which torch.compile uses


# --- tensor parallelism -------------------------------------------------------------------------


def tp_divides(plan: Plan, ground: Ground) -> str | None:
    for name, width in tensor_widths(ground.spec).items():
        if width % plan.tp:
            why = ", and keys are not copied to several ranks" if name == "num_key_value_heads" else ""
            use = either(tensor_degrees(ground.spec, ground.a_node))
            return f"tp={plan.tp} does not divide {name}={width}{why}; use tp={use}"
    rows = -(-ground.spec.vocab // plan.tp)
    if rows * (plan.tp - 1) >= ground.spec.vocab:
        return f"tp={plan.tp} leaves a rank without any of vocab_size={ground.spec.vocab}; use fewer ranks"
    return None


def tp_within_a_node(plan: Plan, ground: Ground) -> str | None:
    if plan.tp == 1 or ground.tp_pinned:
        return None
    use = either(tensor_degrees(ground.spec, ground.a_node))
    if plan.tp > ground.a_node:
        return (
            f"tp={plan.tp} needs more than the {ground.a_node} GPUs of a node, and its traffic is too dear between "
            f"nodes; use tp={use}, or pin it"
        )
    if plan.world_size > ground.a_node and ground.a_node % plan.tp:
        return (
            f"tp={plan.tp} does not divide the {ground.a_node} GPUs of a node, so a group would span two; "
            f"use tp={use}"
        )
    return None


def sequence_parallel(plan: Plan, ground: Ground) -> str | None:
    if not plan.sequence_parallel:
        return None
    if plan.tp == 1:
        return (
            "sequence parallelism with tp=1 has no ranks to cut a row over; use tp=2 or more, or leave it out"
        )
    return None


# --- pipeline parallelism -----------------------------------------------------------------------


def stages_have_layers(plan: Plan, ground: Ground) -> str | None:
    layers = ground.spec.layers
    if plan.pp > layers:
        return f"pp={plan.pp} is more than the model's {layers} layers, and a stage needs one; use pp={layers} or less"
    if plan.pp * plan.virtual_stages > layers:
        return (
            f"pp={plan.pp} x virtual_stages={plan.virtual_stages} is more than the model's {layers} layers; "
            f"use virtual_stages={max(1, layers // plan.pp)} or less"
        )
    return None


def schedule_fits(plan: Plan, ground: Ground) -> str | None:
    if (plan.schedule == "none") != (plan.pp == 1):
        use = "pp=2 or more, or leave the schedule open" if plan.pp == 1 else "a schedule, or pp=1"
        return f"schedule={plan.schedule} does not go with pp={plan.pp}; use {use}"
    chunked = {"interleaved1f1b": plan.virtual_stages >= 2, "zerobubble": plan.virtual_stages == 2}
    if not chunked.get(plan.schedule, plan.virtual_stages == 1):
        return f"virtual_stages={plan.virtual_stages} does not go with {plan.schedule}; use interleaved1f1b, or 1"
    return None


def zero_bubble_splits_the_backward_pass(plan: Plan, ground: Ground) -> str | None:
    if plan.schedule != "zerobubble":
        return None
    if ground.work.method != "full":
        return f"zerobubble fills its bubble with gradients of weights, which {ground.work.method} hardly has; use 1f1b"
    if plan.activation_checkpointing != "none":
        return (
            "zerobubble runs a backward pass in two parts, and layers would be computed again for each with "
            f"activation_checkpointing={plan.activation_checkpointing}; use none, or 1f1b"
        )
    if plan.compiled:
        return "zerobubble runs a backward pass in two parts, and a compiled one is whole; use 1f1b, or compile=false"
    return None


def stages_stay_busy(plan: Plan, ground: Ground) -> str | None:
    """What torch.distributed.pipelining asks of the number of micro-batches (GPipe and zero-bubble: nothing)."""
    m, p = plan.accumulation, plan.pp
    if plan.schedule == "1f1b" and m < p:
        return (
            f"1f1b with pp={p} needs at least {p} micro-batches and has accumulation={m}; use a smaller micro-batch, "
            "or gpipe"
        )
    if plan.schedule == "interleaved1f1b" and m % rounds(m, p):
        return (
            f"interleaved1f1b with pp={p} works through accumulation={m} in {rounds(m, p)} rounds, which do not divide "
            f"it; use a multiple of {p}, or 1f1b"
        )
    return None


# --- data parallelism, engine, offload ----------------------------------------------------------


def world_is_there(plan: Plan, ground: Ground) -> str | None:
    world = plan.world_size
    said = f"data-parallel {plan.data_parallel} x tp={plan.tp} x pp={plan.pp} = {world}"
    if world > ground.ranks:
        return f"{said} needs a GPU a process, and {ground.ranks} can be used here; use smaller degrees"
    if plan.device == "cuda" and world > ground.a_node and world % ground.a_node:
        return (
            f"{said} leaves GPUs of a node over, and over several nodes each is used whole; make it a multiple of "
            f"{ground.a_node}"
        )
    return None


def batch_is_kept(plan: Plan, ground: Ground) -> str | None:
    if ground.batch % plan.data_parallel:
        use = either(d for d in divisors(ground.batch) if d <= ground.ranks)
        return (
            f"a data-parallel degree of {plan.data_parallel} does not divide the global batch {ground.batch}; "
            f"use {use}"
        )
    if plan.global_batch != ground.batch:
        made = f"{plan.micro_batch} x {plan.accumulation} x {plan.data_parallel} = {plan.global_batch}"
        return (
            f"micro-batch x accumulation x data-parallel degree is {made} and the global batch {ground.batch}; use "
            "degrees that make it"
        )
    return None


def engine_fits(plan: Plan, ground: Ground) -> str | None:
    zero = plan.sharding.startswith("zero")
    if zero != (plan.engine == "deepspeed"):
        return f"{plan.sharding} is not of the engine {plan.engine}; use deepspeed for ZeRO and torch for all else"
    if zero and plan.pp > 1:
        return (
            f"{plan.sharding} does not go with pp={plan.pp}: DeepSpeed's pipeline refuses ZeRO-2 and 3, and its ZeRO-1 "
            "is not used here; use fsdp2 beside a pipeline, or pp=1"
        )
    if zero and plan.tp > 1:
        return (
            f"{plan.sharding} does not go with tp={plan.tp}: DeepSpeed takes every rank for a copy and knows nothing "
            "of layers that are cut here; use fsdp2 beside tensor parallelism, or tp=1"
        )
    if zero and plan.dp_replicate > 1:
        return f"{plan.sharding} shards over all data-parallel ranks; use dp_replicate=1, or fsdp2 to keep replicas"
    if plan.sharding == "none" and plan.dp_shard > 1:
        return f"dp_shard={plan.dp_shard} with sharding=none shares nothing out; use fsdp2 or dp_shard=1"
    if plan.sharding == "fsdp2" and plan.dp_shard == 1:
        return "fsdp2 over one rank shares nothing out; use sharding=none or dp_shard of 2 and more"
    return None


def offload_fits(plan: Plan, ground: Ground) -> str | None:
    if plan.offload != "none" and plan.sharding not in ("zero2", "zero3"):
        return f"offload={plan.offload} needs DeepSpeed's zero2 or zero3 and sharding is {plan.sharding}; use these"
    if plan.offload == "nvme" and plan.sharding != "zero3":
        return f"offload=nvme needs zero3 (DeepSpeed's rule) and sharding is {plan.sharding}; use zero3, or offload=cpu"
    if plan.offload_parameters == "none" or (plan.sharding == "zero3" and plan.offload != "none"):
        return None
    if plan.offload == "none" and plan.sharding in ("none", "zero3"):
        return "offloaded weights need an offloaded optimizer beside them; set offload=cpu too"
    return (
        f"offload_parameters={plan.offload_parameters} needs zero3 and sharding is {plan.sharding}; use zero3"
    )


def one_process_replicates(plan: Plan, ground: Ground) -> str | None:
    if plan.replication == "ddp":
        return None
    if plan.engine != "torch" or plan.sharding != "none" or plan.tp > 1 or plan.pp > 1:
        return "data_parallel replicates a whole model from one process; use ddp with other splits"
    if plan.device == "cpu":
        return "torch's DataParallel only calls the module on a CPU, where there is nothing to copy it to; use ddp"
    if plan.world_size > ground.a_node:
        return f"data_parallel is one process on one node of {ground.a_node} GPUs and has {plan.world_size}; use ddp"
    if plan.dp_replicate == 1:
        return "data_parallel needs two GPUs or more; use ddp"
    if plan.activation_checkpointing == "selective":
        return (
            "data_parallel computes layers again in other threads than they ran in, where what selective recomputing "
            "kept is not always found; use activation_checkpointing=none or full, or ddp"
        )
    if ground.work.attended is not None and ground.spec.position == "alibi":
        return (
            f"packed documents of {ground.spec.family} are kept apart by hooks on its layers, which the copies of "
            "data_parallel would share; use ddp, or prepare_data.packing=none"
        )
    return None


def device_fits(plan: Plan, ground: Ground) -> str | None:
    if plan.backend == "gloo" and plan.device == "cuda":
        if plan.engine == "deepspeed":
            return f"{plan.sharding} on GPUs sends over nccl, and ddp_backend is gloo; use nccl, auto or sharding=none"
        if plan.sharding == "fsdp2":
            return (
                "fsdp2 on GPUs gathers over nccl, and ddp_backend is gloo; use nccl or auto, or sharding=none"
            )
        if plan.tp > 1 or plan.pp > 1:
            return (
                f"tp={plan.tp} x pp={plan.pp} on GPUs sends activations over nccl, and ddp_backend is gloo; use nccl "
                "or auto, or tp=1 and pp=1"
            )
    if plan.backend == "nccl" and plan.device == "cpu":
        return "nccl needs CUDA GPUs, and training is on the CPU here; use gloo"
    return None


def hook_is_of_ddp(plan: Plan, ground: Ground) -> str | None:
    hook = ground.work.communication_hook
    if hook == "none":
        return None
    plain = plan.engine == "torch" and plan.sharding == "none" and plan.replication == "ddp"
    if not plain or plan.tp > 1 or plan.pp > 1:
        return (
            f"train.communication_hook={hook} rounds what DDP sends, and {plan.name} is more than DDP; use "
            "sharding=none with tp=1 and pp=1, or train.communication_hook=none"
        )
    if hook == "powersgd" and ground.work.precision == "float16" and plan.data_parallel > 1:
        return (
            "train.communication_hook=powersgd would keep the infinities of a float16 overflow for all later steps; "
            "use another precision or hook"
        )
    return None


def compiling_fits(plan: Plan, ground: Ground) -> str | None:
    if not plan.compiled:
        return None
    if plan.device == "cpu":
        return (
            "compiled layers are for GPUs alone, and training is on the CPU here; use compile=false or auto"
        )
    oldest = min((gpu.compute_capability for gpu in ground.hardware.gpus), default=LEAST_CAPABILITY)
    if oldest < LEAST_CAPABILITY:
        has, needs = (".".join(map(str, pair)) for pair in (oldest, LEAST_CAPABILITY))
        return f"a GPU here has compute capability {has}, and compiled kernels need {needs}; use compile=false or auto"
    if plan.replication == "data_parallel":
        return "data_parallel copies the layers for every micro-batch, and each copy would be compiled anew; use ddp"
    if plan.engine != "torch":
        return f"the engine torch alone compiles layers, and the engine is {plan.engine}; use torch, or compile=false"
    if plan.sharding == "fsdp2" and ground.work.method == "full" and ground.work.precision != "float32":
        return (
            f"fsdp2 gathers a layer's norms apart in full tuning in {ground.work.precision}, which torch.compile "
            "cannot trace; use compile=false, or sharding=none"
        )
    return None


TENSOR: tuple[Rule, ...] = (tp_divides, tp_within_a_node, sequence_parallel, qlora_is_cut_between_blocks)
PIPELINE: tuple[Rule, ...] = (stages_have_layers, schedule_fits, zero_bubble_splits_the_backward_pass)
LAYOUT: tuple[Rule, ...] = (
    world_is_there,
    batch_is_kept,
    engine_fits,
    offload_fits,
    one_process_replicates,
    device_fits,
    hook_is_of_ddp,
    optimizer_sees_whole_parameters,
    compiling_fits,
)
STEP: tuple[Rule, ...] = (stages_stay_busy,)
COMPILING: tuple[Rule, ...] = (zero_bubble_splits_the_backward_pass, compiling_fits)
RULES = TENSOR + PIPELINE + LAYOUT + STEP


class Broken(NamedTuple):
    """A broken rule: its name, and the sentence of value, rule and way out."""

    rule: str
    sentence: str


def broken(plan: Plan, ground: Ground, rules: tuple[Rule, ...] = RULES) -> Broken | None:
    """The first rule that a plan breaks, or None."""
    for rule in rules:
        sentence = rule(plan, ground)
        if sentence:
            return Broken(rule.__name__, sentence)
    return None
