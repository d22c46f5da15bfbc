"""Which plans are legal: one rule a function, each with a sentence of value, rule and way out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from tasks.contracts import HardwareProfile, ModelSpec, Plan
from tasks.planner.workload import Workload


@dataclass(frozen=True)
class Ground:
    """What the rules look at beside the plan. `ranks` processes can be started, `a_node` of them on one node."""

    spec: ModelSpec
    work: Workload
    hardware: HardwareProfile
    batch: int
    ranks: int
    a_node: int
    tp_pinned: bool = False


Rule = Callable[[Plan, Ground], str | None]


def divisors(number: int) -> list[int]:
    """Ascending."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def either(values: Iterable[int]) -> str:
    """1, 2 or 4"""
    words = [str(value) for value in values]
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]


def tensor_widths(spec: ModelSpec) -> dict[str, int]:
    """What tensor parallelism cuts, and how wide it is."""
    widths = {
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "intermediate_size": spec.ffn,
    }
    if spec.moe is not None:
        widths["the experts' intermediate size"] = spec.moe.ffn
        if spec.moe.shared_ffn:
            widths["the shared experts' intermediate size"] = spec.moe.shared_ffn
    return widths | {"vocab_size": spec.vocab}


def tensor_degrees(spec: ModelSpec, most: int) -> list[int]:
    return [degree for degree in divisors(gcd(*tensor_widths(spec).values())) if degree <= most]


# --- tensor parallelism -------------------------------------------------------------------------


def tp_divides(plan: Plan, ground: Ground) -> str | None:
    for name, width in tensor_widths(ground.spec).items():
        if width % plan.tp:
            why = {
                "num_key_value_heads": ", and keys are not copied to several ranks",
                "vocab_size": ", and the vocabulary is not padded",
            }.get(name, "")
            use = either(tensor_degrees(ground.spec, ground.a_node))
            return f"tp={plan.tp} does not divide {name}={width}{why}; use tp={use}"
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
    if plan.engine == "deepspeed":
        return "sequence_parallel is not part of DeepSpeed's tensor parallelism; use the engine torch, or leave it out"
    if plan.tp == 1:
        return (
            "sequence parallelism with tp=1 has no ranks to cut a row over; use tp=2 or more, or leave it out"
        )
    for name, width in (("hidden_size", ground.spec.hidden), ("the longest row", ground.work.sequence)):
        if width % plan.tp:
            return (
                f"sequence parallelism over tp={plan.tp} does not divide {name}={width}; use another tp, a multiple "
                "of it as sequence length, or leave sequence parallelism out"
            )
    return None


def qlora_is_whole(plan: Plan, ground: Ground) -> str | None:
    if ground.work.method != "qlora":
        return None
    if plan.sharding == "zero3":
        return "zero3 with qlora would shard packed 4-bit weights, which DeepSpeed cannot gather; use fsdp2, or lora"
    if plan.tp > 1:
        return (
            f"tp={plan.tp} with qlora would cut packed 4-bit matrices by rows and columns; use fsdp2, or lora"
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
        return (
            f"schedule={plan.schedule} does not go with pp={plan.pp}; use none for pp=1, a schedule for more"
        )
    chunked = {"interleaved1f1b": plan.virtual_stages >= 2, "zerobubble": plan.virtual_stages == 2}
    if not chunked.get(plan.schedule, plan.virtual_stages == 1):
        return f"virtual_stages={plan.virtual_stages} does not go with {plan.schedule}; use interleaved1f1b, or 1"
    if plan.schedule == "zerobubble" and ground.work.method != "full":
        return f"zerobubble fills its bubble with gradients of weights, which {ground.work.method} hardly has; use 1f1b"
    return None


def stages_stay_busy(plan: Plan, ground: Ground) -> str | None:
    """What torch.distributed.pipelining asks of the number of micro-batches (interleaved: as Megatron does)."""
    m, p = plan.accumulation, plan.pp
    if plan.schedule in ("1f1b", "zerobubble") and m < p:
        return (
            f"{plan.schedule} with pp={p} needs at least {p} micro-batches and has accumulation={m}; use a smaller "
            "micro-batch, or gpipe"
        )
    if plan.schedule == "interleaved1f1b" and m % p:
        return f"interleaved1f1b needs an accumulation that pp={p} divides and has {m}; use 1f1b or another micro-batch"
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
    if plan.sharding == "zero3" and plan.tp > 1:
        return (
            f"zero3 with tp={plan.tp} is not supported by DeepSpeed's tensor parallelism; use zero2, or fsdp2"
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
    if plan.offload_parameters != "none" and plan.sharding != "zero3":
        return f"offload_parameters={plan.offload_parameters} needs zero3 and sharding is {plan.sharding}; use zero3"
    if plan.offload_parameters != "none" and plan.offload == "none":
        return "offloaded weights need an offloaded optimizer beside them; set offload=cpu too"
    return None


def one_process_replicates(plan: Plan, ground: Ground) -> str | None:
    if plan.replication == "ddp":
        return None
    if plan.engine != "torch" or plan.sharding != "none" or plan.tp > 1 or plan.pp > 1:
        return "data_parallel replicates a whole model from one process; use ddp with other splits"
    if plan.world_size > ground.a_node:
        return f"data_parallel is one process on one node of {ground.a_node} GPUs and has {plan.world_size}; use ddp"
    if plan.device == "cpu" or plan.dp_replicate == 1:
        return "data_parallel needs two GPUs or more; use ddp"
    return None


def device_fits(plan: Plan, ground: Ground) -> str | None:
    if plan.device == "cpu" and plan.engine == "deepspeed":
        return "deepspeed is planned for GPUs alone, and training is on the CPU here; use the engine torch"
    if plan.sharding == "fsdp2" and plan.backend == "gloo" and plan.device == "cuda":
        return "fsdp2 on GPUs gathers weights over nccl, and ddp_backend is gloo; use nccl or auto, or sharding=none"
    if plan.backend == "nccl" and plan.device == "cpu":
        return "nccl needs CUDA GPUs, and training is on the CPU here; use gloo"
    return None


TENSOR: tuple[Rule, ...] = (tp_divides, tp_within_a_node, sequence_parallel)
PIPELINE: tuple[Rule, ...] = (stages_have_layers, schedule_fits)
LAYOUT: tuple[Rule, ...] = (
    world_is_there,
    batch_is_kept,
    engine_fits,
    qlora_is_whole,
    offload_fits,
    one_process_replicates,
    device_fits,
)
STEP: tuple[Rule, ...] = (stages_stay_busy,)
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
