"""What one search is about: model, recipe, machine, wishes, and what may be tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Literal

from tasks.contracts import CostEstimate, HardwareProfile, ModelSpec, Plan, Rates
from tasks.errors import UserError
from tasks.params import SelectStrategyParams
from tasks.planner.capabilities import Capabilities
from tasks.planner.cost import CostModel
from tasks.planner.gpus import MIG
from tasks.planner.ground import Ground
from tasks.planner.machine import Machine, machine
from tasks.planner.workload import Workload

Backend = Literal["nccl", "gloo"]
Schedule = Literal["none", "gpipe", "1f1b", "interleaved1f1b", "zerobubble"]
Level = Literal["none", "selective", "full"]
DEGREES = {
    "data_parallel": "data_parallel_degree",
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "micro_batch": "per_device_train_batch_size",
    "accumulation": "gradient_accumulation_steps",
}
OTHER_KEYS = {
    "backend": "select_strategy.ddp_backend",
    "schedule": "select_strategy.pipeline_schedule",
    "compiled": "select_strategy.compile",
    "communication_hook": "train.communication_hook",
    "optim": "train.optim",
    "evaluation_rows": "evaluate.batch_size",
    "method": "train.finetuning_type",
    "sequence": "prepare_data.max_length",
}
WORDS = (
    "activation_checkpointing",
    "engine",
    "backend",
    "sharding",
    "offload",
    "offload_parameters",
    "schedule",
    "replication",
    "sequence_parallel",
    "compiled",
)
# Seconds that torch.compile takes before the first step of a run: a decoder layer and the loss, for one row length and
# then for any, forward and backward.
COMPILE_SECONDS = 90.0


@dataclass(frozen=True)
class Pins:
    """What of a plan is wished for; None leaves it to the search. Names are those of `Plan`.

    `gpus` is the most GPUs that may be used.
    """

    data_parallel: int | None = None
    tp: int | None = None
    pp: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    activation_checkpointing: Level | None = None
    engine: str | None = None
    backend: Backend | None = None
    sharding: str | None = None
    offload: str | None = None
    offload_parameters: str | None = None
    schedule: Schedule | None = None
    replication: str | None = None
    sequence_parallel: bool | None = None
    compiled: bool | None = None
    gpus: int | None = None

    @classmethod
    def of(cls, strategy: SelectStrategyParams) -> Pins:
        """The wishes of params.yaml; auto leaves open."""

        def said(key: str) -> object:
            value = getattr(strategy, key)
            return None if value == "auto" else value

        named = {field: said(key) for field, key in DEGREES.items()}
        named |= {
            key: said(key) for key in ("activation_checkpointing", "engine", "sharding", "sequence_parallel")
        }
        named |= {key: said(key) for key in ("replication", "offload", "offload_parameters")}
        named |= {
            "backend": said("ddp_backend"),
            "schedule": said("pipeline_schedule"),
            "compiled": said("compile"),
        }
        return cls(**named)  # type: ignore[arg-type]

    @property
    def said(self) -> dict[str, object]:
        """What is wished for, the most GPUs and the backend aside."""
        return {
            part.name: value
            for part in fields(self)
            if (value := getattr(self, part.name)) is not None and part.name not in ("gpus", "backend")
        }

    def allow(self, plan: Plan) -> bool:
        """Whether a plan is as wished, its micro-batch aside."""
        return all(
            getattr(self, name) in (None, getattr(plan, name))
            for name in ("data_parallel", "tp", "pp", *WORDS)
        )


@dataclass(frozen=True)
class Problem:
    """One search. `batch` is the global batch, `margin` the share of memory kept free, `steps` the run's optimizer
    steps where they are known.

    `options` are how values were said on a command line, such as {"tp": "--tp {}"}; others are keys of params.yaml.
    """

    spec: ModelSpec
    hardware: HardwareProfile
    work: Workload
    batch: int
    capabilities: Capabilities
    pins: Pins = Pins()
    margin: float = 0.1
    evaluation_rows: int = 8
    rates: Rates | None = None
    corrections: Mapping[str, float] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    steps: int | None = None

    def changed(self, **values: object) -> Problem:
        return replace(self, **values)  # type: ignore[arg-type]

    def say(self, name: str, value: object) -> str:
        """A value as its user writes it: an option, or a key of params.yaml."""
        if isinstance(value, bool):
            value = str(value).lower()
        if name in self.options:
            return self.options[name].format(value)
        key = OTHER_KEYS.get(name) or f"select_strategy.{DEGREES.get(name, name)}"
        return f"{key}={value}"

    @cached_property
    def machine(self) -> Machine:
        return machine(self.hardware, self.work.precision, self.rates)

    @cached_property
    def cost(self) -> CostModel:
        return CostModel(
            self.spec,
            self.work,
            self.machine,
            self.margin,
            self.evaluation_rows,
            corrections=self.corrections,
        )

    def step_seconds(self, plan: Plan, cost: CostEstimate) -> float:
        """A step, with the share that each of the run's steps has in compiling."""
        if not plan.compiled or self.steps is None:
            return cost.total_seconds
        return cost.total_seconds + COMPILE_SECONDS / self.steps

    @cached_property
    def most_ranks(self) -> int:
        """Processes that can be started: one a GPU (one for MIG slices), and on a CPU as many as are pinned."""
        if self.hardware.device == "cpu":
            return min(self.batch * (self.pins.tp or 1) * (self.pins.pp or 1), self.pins.gpus or 2**31)
        if any(MIG.search(gpu.name) for gpu in self.hardware.gpus):
            return 1
        nodes = self.hardware.nodes if self.capabilities.nodes else 1
        return min(len(self.hardware.gpus) * nodes, self.pins.gpus or 2**31)

    @cached_property
    def ground(self) -> Ground:
        a_node = len(self.hardware.gpus) if self.hardware.device == "cuda" else self.most_ranks
        return Ground(
            self.spec, self.work, self.hardware, self.batch, self.most_ranks, a_node, self.pins.tp is not None
        )

    @property
    def backend(self) -> Backend:
        """nccl joins GPUs and gloo CPUs, unless said otherwise.

        Raises:
            UserError: nccl is wished for on a CPU.
        """
        if self.pins.backend is None:
            return "nccl" if self.hardware.device == "cuda" else "gloo"
        if self.pins.backend == "nccl" and self.hardware.device == "cpu":
            raise UserError(
                "select_strategy.ddp_backend=nccl needs CUDA GPUs, and training is on the CPU here; use gloo or auto"
            )
        return self.pins.backend
