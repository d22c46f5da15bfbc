"""What a trainer can execute: of this version, and of all that is planned."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.contracts import ModelSpec, Plan
from tasks.planner.families import FAMILIES
from tasks.planner.workload import Method, Workload


@dataclass(frozen=True)
class Capabilities:
    """What a trainer can execute.

    `split_families` are those whose layers can be cut over ranks or dealt out over stages, `isolating_families` those
    whose attention keeps packed documents apart.
    """

    shardings: frozenset[str]
    levels: tuple[str, ...]
    methods: tuple[Method, ...]
    tensor: bool
    pipeline: bool
    split_families: frozenset[str]
    offload: bool
    nodes: bool
    images: bool
    disk: bool = True  # offload to NVMe, where nothing else fits
    isolating_families: frozenset[str] = frozenset(FAMILIES)

    def splits(self, spec: ModelSpec) -> bool:
        """Whether the model's layers can be cut over ranks or dealt out over stages."""
        return spec.family in self.split_families and (self.images or spec.vision is None)

    def isolates(self, spec: ModelSpec) -> bool:
        """Whether packed documents are kept apart."""
        return spec.family in self.isolating_families and spec.vision is None

    def can(self, plan: Plan, spec: ModelSpec, work: Workload, gpus_per_node: int) -> bool:
        """Whether a plan of the planner's space can be trained."""
        return (
            plan.sharding in self.shardings
            and plan.activation_checkpointing in self.levels
            and work.method in self.methods
            and (plan.tp == 1 or (self.tensor and self.splits(spec)))
            and (plan.pp == 1 or (self.pipeline and self.splits(spec)))
            and (self.offload or (plan.offload == "none" and plan.offload_parameters == "none"))
            and (self.nodes or plan.device == "cpu" or plan.world_size <= gpus_per_node)
            and (self.images or not work.longest_tiles)
        )


ZERO = frozenset({"zero0", "zero1", "zero2", "zero3"})
TRAINABLE_NOW = Capabilities(
    shardings=frozenset({"none", "fsdp2"}) | ZERO,
    levels=("none", "selective", "full"),
    methods=("full", "lora", "qlora"),
    tensor=True,
    pipeline=True,
    split_families=frozenset({"llama", "mistral", "qwen2", "qwen3", "glm", "glm4", "bloom", "llama_alibi"}),
    # A test asks each. MPT's layers read a mask the other way round, OPT's decoder and the class for Baichuan-13B make
    # their own, and Falcon's of transformers 5.17 does not look at positions.
    isolating_families=frozenset(FAMILIES)
    - {"mpt", "opt", "falcon", "llama_alibi", "qwen", "baichuan", "chatglm"},
    offload=True,
    nodes=False,
    images=False,
)
EVERYTHING = Capabilities(
    shardings=frozenset({"none", "fsdp2"}) | ZERO,
    levels=("none", "selective", "full"),
    methods=("full", "lora", "qlora"),
    tensor=True,
    pipeline=True,
    split_families=frozenset(FAMILIES),
    offload=True,
    nodes=True,
    images=True,
)
