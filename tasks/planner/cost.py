"""Everything a Plan costs, in one contract."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tasks.contracts import CostEstimate, ModelSpec, Plan
from tasks.planner.compute import model_flops
from tasks.planner.host_memory import host_memory
from tasks.planner.machine import Machine
from tasks.planner.memory import evaluation_bytes, memory, save_bytes
from tasks.planner.time import seconds
from tasks.planner.workload import ELASTANE, Software, Workload


def regime(work: Workload, plan: Plan) -> str:
    """What a correction holds for: method, precision, checkpointing and compiling decide which kernels run."""
    compiled = " compiled" if plan.compiled else ""
    return f"{work.method} {work.precision} {plan.activation_checkpointing}{compiled}"


@dataclass(frozen=True)
class CostModel:
    """One recipe on one machine.

    `margin` is the share of GPU memory kept free, `evaluation_rows` the rows scored at once in evaluation.
    `corrections` are factors on the seconds of a `regime`, learnt from trials on this machine.
    """

    spec: ModelSpec
    work: Workload
    machine: Machine
    margin: float = 0.1
    evaluation_rows: int = 8
    software: Software = ELASTANE
    corrections: Mapping[str, float] = field(default_factory=dict)

    def correction(self, plan: Plan) -> float:
        """The learnt factor; one that is known of plain layers alone holds for compiled ones too."""
        name = regime(self.work, plan)
        return self.corrections.get(name) or self.corrections.get(name.removesuffix(" compiled"), 1.0)

    def memory_limit(self, plan: Plan) -> int:
        """Bytes one rank may fill. Ranks on one CPU share its memory."""
        if plan.device == "cpu":
            return int(self.machine.gpu_memory * (1 - self.margin) / plan.world_size)
        return int(self.machine.gpu_memory * (1 - self.margin))

    def host_limit(self) -> int:
        return int(self.machine.host_memory * (1 - self.margin))

    def estimate(self, plan: Plan) -> CostEstimate:
        """Memory, host memory, time, tokens/s and MFU of a plan, whether it fits or not."""
        terms = memory(self.spec, plan, self.work, self.software)
        spent, speed, mfu = self._time(plan)
        return CostEstimate(
            memory_bytes=terms,
            memory_limit_bytes=self.memory_limit(plan),
            seconds=spent,
            tokens_per_second=speed,
            mfu=mfu,
            save_bytes=save_bytes(self.spec, plan, self.work, terms),
            evaluation_bytes=evaluation_bytes(
                self.spec, plan, self.work, self.software, terms, self.evaluation_rows
            ),
            host_bytes=host_memory(self.spec, plan, self.work, self.machine),
            host_limit_bytes=self.host_limit(),
        )

    def compiled(self, plan: Plan, plain: CostEstimate) -> CostEstimate:
        """The estimate of a compiled plan, from that of the same plan with plain layers."""
        if self.software.compiled_memory:
            return self.estimate(plan)
        spent, speed, mfu = self._time(plan)
        return plain.model_copy(update={"seconds": spent, "tokens_per_second": speed, "mfu": mfu})

    def _time(self, plan: Plan) -> tuple[dict[str, float], float, float]:
        """Seconds by term, tokens/s and MFU."""
        spent = seconds(self.spec, plan, self.work, self.machine, self.software)
        factor = self.correction(plan)
        if factor != 1.0:
            spent = {name: taken * factor for name, taken in spent.items()}
        total = sum(spent.values())
        flops = model_flops(self.spec, self.work) * plan.global_batch
        peak = self.machine.peak * (plan.world_size if plan.device == "cuda" else 1)
        return spent, plan.global_batch * self.work.mean_row / total, flops / total / peak

    def fits(self, cost: CostEstimate) -> bool:
        """Whether GPU and host hold it. On a CPU both are the same memory, which is counted once."""
        if cost.peak_bytes > cost.memory_limit_bytes:
            return False
        return self.machine.device == "cpu" or sum(cost.host_bytes.values()) <= cost.host_limit_bytes
