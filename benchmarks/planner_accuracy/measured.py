"""What a published row measured: seconds of a step, bytes of a GPU."""

from __future__ import annotations

from tasks.contracts import Plan
from tasks.planner.workload import Workload

Row = dict[str, str]
GB = 1e9
GIB = 2.0**30


def number(row: Row, key: str, default: float) -> float:
    text = row.get(key, "")
    return float(text) if text not in ("", "nan") else default


def seconds_of(row: Row, plan: Plan, work: Workload) -> float | None:
    """Seconds of an optimizer step, from whichever figure the row gives."""
    if row["status"] != "ok":
        return None
    if row.get("iter_time_s"):
        taken = float(row["iter_time_s"])
        taken = taken * plan.accumulation if "micro-batch iteration" in row["notes"] else taken
        tflops = number(row, "tflops_per_gpu", 0)
        if tflops and not 0.5 < _from_tflops(row, plan, work) / taken < 2:
            return None  # the row's own time and TFLOP/s contradict each other
        return taken
    tokens = plan.global_batch * work.sequence
    if row.get("tokens_per_s_per_gpu"):
        return tokens / (float(row["tokens_per_s_per_gpu"]) * plan.world_size)
    if row.get("samples_per_s"):
        return plan.global_batch / float(row["samples_per_s"])
    if row.get("tflops_per_gpu"):
        return _from_tflops(row, plan, work)
    return None


def _from_tflops(row: Row, plan: Plan, work: Workload) -> float:
    """Megatron's hardware FLOPs with full recomputation: 96 B l s h^2 (1 + s/6h + V/16lh) (arXiv:2104.04473 eq. 3)."""
    h, layers, s = (number(row, key, 0) for key in ("hidden", "layers", "seq_len"))
    vocab = number(row, "vocab", 50257)
    flops = 96 * plan.global_batch * layers * s * h * h * (1 + s / (6 * h) + vocab / (16 * layers * h))
    return flops / (float(row["tflops_per_gpu"]) * 1e12 * plan.world_size)


def memory_of(row: Row) -> float | None:
    """Bytes a GPU. Figures summed over GPUs are divided, as the notes say."""
    if not row.get("mem_per_gpu") or row["status"] != "ok":
        return None
    unit = {"GB": GB, "MiB": 2.0**20}.get(row["mem_unit"], GIB)
    if row["mem_kind"].startswith("nvidia-smi"):
        unit = GIB
    return float(row["mem_per_gpu"]) * unit
