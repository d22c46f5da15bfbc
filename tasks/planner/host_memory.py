"""Bytes of host memory of one node by term: where offload and loading run out."""

from __future__ import annotations

from tasks.contracts import ModelSpec, Plan
from tasks.planner.activations import COMPUTE_BYTES, FLOAT32
from tasks.planner.machine import Machine
from tasks.planner.memory import GIB, trainable_parameters
from tasks.planner.workload import Workload

PROCESS = 2.5 * GIB  # a rank with CUDA libraries loaded: 2 to 3 GiB resident (LitGPT's FSDP rows report 3 GB)
ALLOWANCE = 1.5  # DeepSpeed's own estimator multiplies host memory by 1.5 for pinned buffers and fragments


def host_memory(spec: ModelSpec, plan: Plan, work: Workload, machine: Machine) -> dict[str, int]:
    """Processes, loading, and what is offloaded.

    Offloaded optimizer state is float32 weights, two moments and a float32 gradient (16 bytes a trained parameter);
    offloaded weights another 2. DeepSpeed's memory estimator (docs, memory-requirements page) gives the same terms
    with the 1.5 allowance. Weights stream from their files shard by shard: a rank holds one file's worth at a time.
    """
    here = min(plan.world_size, machine.gpus_per_node) if plan.device == "cuda" else plan.world_size
    ranks = max(1, here)
    trained = trainable_parameters(spec, work)
    part = ranks / plan.world_size if plan.sharding != "none" or plan.pp > 1 or plan.tp > 1 else 1.0
    terms = {"processes": ranks * PROCESS if plan.device == "cuda" else 0.0}
    terms["loading"] = ranks * min(5e9, spec.parameters * COMPUTE_BYTES[work.precision])
    if plan.offload == "cpu":
        terms["optimizer"] = trained * part * 4 * FLOAT32 * ALLOWANCE
    elif plan.offload == "nvme":
        terms["optimizer"] = min(trained * part * 4 * FLOAT32, 20e9)
    if plan.offload_parameters == "cpu":
        terms["weights"] = spec.parameters * part * COMPUTE_BYTES[work.precision] * ALLOWANCE
    return {name: int(size) for name, size in terms.items()}
