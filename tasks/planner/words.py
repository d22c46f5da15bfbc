"""Numbers and plans as users read them."""

from __future__ import annotations

from tasks.contracts import CostEstimate, Plan
from tasks.planner.memory import GIB


def gib(number: float) -> str:
    """Bytes in GiB, with one decimal (two below 0.1 GiB)."""
    return f"{number / GIB:.1f}" if number >= 0.1 * GIB else f"{number / GIB:.2f}"


def seconds(number: float) -> str:
    """Seconds, in ms or µs where they are few."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number / 1e-6:.3g} µs"


def settings(plan: Plan) -> str:
    """ddp2, micro-batch 4 x accumulation 2, activation_checkpointing=none"""
    schedule = f", {plan.schedule}" if plan.pp > 1 else ""
    return (
        f"{plan.name}, micro-batch {plan.micro_batch} x accumulation {plan.accumulation}{schedule}, "
        f"activation_checkpointing={plan.activation_checkpointing}" + (", compiled" if plan.compiled else "")
    )


def largest_terms(terms: dict[str, int]) -> str:
    largest = sorted(terms.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {gib(number)}" for name, number in largest if number)


def over(number: int) -> str:
    """How much too much, in MiB where it is little."""
    return f"{gib(number)} GiB too much" if number >= 0.1 * GIB else f"{number / 2**20:.0f} MiB too much"


def terms(cost: CostEstimate) -> str:
    """What takes most at the fullest moment; only that of training is known by term."""
    if moment(cost) == "in training":
        return largest_terms(cost.memory_bytes)
    return (
        "longest rows side by side, evaluate.batch_size of them"
        if "eval" in moment(cost)
        else "weights, optimizer state and a layer gathered"
    )


def moment(cost: CostEstimate) -> str:
    """When the GPU is fullest."""
    if cost.peak_bytes == cost.total_bytes:
        return "in training"
    return "in evaluation" if cost.peak_bytes == cost.evaluation_bytes else "while a checkpoint is saved"


def excess(cost: CostEstimate, device: str) -> int:
    """Bytes over the limit of GPU or host, whichever is more; at most 0 where the plan fits."""
    over = cost.peak_bytes - cost.memory_limit_bytes
    return over if device == "cpu" else max(over, sum(cost.host_bytes.values()) - cost.host_limit_bytes)


def shortage(cost: CostEstimate, device: str) -> str:
    """What there is too little of, when, by how much, and what takes most."""
    host = sum(cost.host_bytes.values())
    if device == "cuda" and cost.peak_bytes <= cost.memory_limit_bytes and host > cost.host_limit_bytes:
        return (
            f"needs {gib(host)} GiB of {gib(cost.host_limit_bytes)} GiB host memory a node, "
            f"{over(host - cost.host_limit_bytes)} ({largest_terms(cost.host_bytes)})"
        )
    return (
        f"needs {gib(cost.peak_bytes)} GiB of {gib(cost.memory_limit_bytes)} GiB {moment(cost)}, "
        f"{over(cost.peak_bytes - cost.memory_limit_bytes)} ({terms(cost)})"
    )
