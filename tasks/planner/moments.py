"""What the recipe's optimizer asks of a plan: bytes of state, bytes moved, and parameters that nothing cuts."""

from __future__ import annotations

from dataclasses import replace

from tasks.contracts import ModelSpec, Plan
from tasks.optimizers import BLOCK, OPTIMIZERS
from tasks.planner.ground import Ground
from tasks.planner.workload import Software, Workload

ADAMW = OPTIMIZERS["adamw_torch"]


def with_moments(software: Software, spec: ModelSpec, work: Workload) -> Software:
    """A trainer with the recipe's optimizer; what it keeps of AdamW is its own habit."""
    return software if work.optim == "adamw_torch" else replace(software, moments=state_bytes(spec, work))


def state_bytes(spec: ModelSpec, work: Workload) -> float:
    """Bytes of optimizer state a trained parameter; of rows and columns, those of the thinnest matrices."""
    needs = OPTIMIZERS[work.optim]
    if needs.unit != "matrix":
        return needs.state
    thin = spec.hidden if work.method == "full" else work.lora_rank
    return needs.state * (1 / thin + 1 / spec.hidden)


def optimizer_sees_whole_parameters(plan: Plan, ground: Ground) -> str | None:
    """An optimizer whose arithmetic depends on the cut runs where no parameter is cut; offloading cuts them, too."""
    optim = ground.work.optim
    needs = OPTIMIZERS[optim]
    if needs.any_cut or (plan.sharding in ("none", "zero0") and plan.tp == 1 and plan.offload == "none"):
        return None
    unit = "rows and columns of whole matrices" if needs.unit == "matrix" else f"blocks of {BLOCK} numbers"
    if plan.offload != "none":
        return (
            f"train.optim={optim} keeps its state by {unit}, and offload={plan.offload} shares parameters out number "
            "by number; use train.optim=adamw_torch or lion, or offload=none"
        )
    return (
        f"train.optim={optim} keeps its state by {unit} of a parameter, and {plan.name} cuts parameters; use tp=1 with "
        "sharding=none or zero0, or train.optim=adamw_torch or lion"
    )
