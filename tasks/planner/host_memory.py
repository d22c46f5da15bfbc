"""Bytes of host memory of one node by term: where offload and loading run out."""

from __future__ import annotations

from tasks.contracts import ModelSpec, Plan
from tasks.planner.activations import COMPUTE_BYTES
from tasks.planner.machine import Machine
from tasks.planner.memory import GIB, trainable_parameters
from tasks.planner.moments import state_bytes
from tasks.planner.workload import Workload
from tasks.planner.zero import zero_host

PROCESS = 2.5 * GIB  # a rank with CUDA libraries loaded: 2 to 3 GiB resident (LitGPT's FSDP rows report 3 GB)


def host_memory(spec: ModelSpec, plan: Plan, work: Workload, machine: Machine) -> dict[str, int]:
    """Processes, loading, and what is offloaded, see `zero_host`.

    Weights stream from their files shard by shard: a rank holds one file's worth at a time.
    """
    here = min(plan.processes, machine.gpus_per_node) if plan.device == "cuda" else plan.processes
    ranks = max(1, here)
    compute = COMPUTE_BYTES[work.precision]
    terms = {"processes": ranks * PROCESS if plan.device == "cuda" else 0.0}
    terms["loading"] = ranks * min(5e9, spec.parameters * compute)
    if plan.offload != "none":
        trained = trainable_parameters(spec, work)
        frozen = 0.0 if work.method == "full" else float(spec.parameters * compute)
        terms |= zero_host(spec, plan, state_bytes(spec, work), trained, frozen, ranks)
    return {name: int(size) for name, size in terms.items()}
