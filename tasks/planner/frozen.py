"""Bytes of weights that are not trained: in the compute precision, or in NF4 with its scales."""

from __future__ import annotations

from tasks.contracts import ModelSpec, Plan
from tasks.planner.activations import COMPUTE_BYTES
from tasks.planner.workload import Software, Workload

NF4_CODE = 0.5  # bytes a weight; the rest of `Software.four_bit` is scales


def frozen_bytes(spec: ModelSpec, plan: Plan, work: Workload, software: Software) -> float:
    """Bytes a frozen parameter on one rank: under qlora the decoder's linear layers are in NF4.

    Where weights are sharded each rank has 1/dp_shard of them; this project's own trainer keeps scales of NF4 whole.
    """
    sharded = plan.sharding in ("zero3", "fsdp2")
    shard = plan.dp_shard if sharded else 1
    plain = software.frozen if software.frozen is not None else float(COMPUTE_BYTES[work.precision])
    if work.method != "qlora":
        return plain / shard
    share = four_bit_share(spec)
    scales = software.four_bit - NF4_CODE
    packed = NF4_CODE / shard + (scales if software.scales_whole else scales / shard)
    return share * packed + (1 - share) * plain / shard


def four_bit_share(spec: ModelSpec) -> float:
    """The share of parameters that qlora keeps in 4 bits: all of the decoder's linear layers."""
    linear = spec.layers * sum(d_in * d_out for _, d_in, d_out in spec.linear_shapes)
    return min(1.0, linear / spec.parameters)


def gathered_bytes(work: Workload, software: Software) -> float:
    """Bytes a parameter of a decoder layer as it is gathered before it is used."""
    compute = COMPUTE_BYTES[work.precision]
    if work.method != "qlora":
        return compute
    return NF4_CODE if software.scales_whole else software.four_bit + compute / 4


def sent_bytes(work: Workload, software: Software) -> float:
    """Bytes a parameter that ranks send each other when sharded weights are gathered."""
    if work.method == "full" and software.gather is not None:
        return software.gather
    if work.method != "qlora":
        return COMPUTE_BYTES[work.precision]
    return NF4_CODE if software.scales_whole else software.four_bit
