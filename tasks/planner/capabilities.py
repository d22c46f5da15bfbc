"""What a trainer can execute: of this version, and of all that is planned."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.contracts import Plan
from tasks.planner.workload import Method, Workload


@dataclass(frozen=True)
class Capabilities:
    """What a trainer can execute."""

    shardings: frozenset[str]
    levels: tuple[str, ...]
    methods: tuple[Method, ...]
    tensor: bool
    pipeline: bool
    offload: bool
    nodes: bool
    images: bool
    disk: bool = True  # offload to NVMe, where nothing else fits

    def can(self, plan: Plan, work: Workload, gpus_per_node: int) -> bool:
        """Whether a plan of the planner's space can be trained."""
        return (
            plan.sharding in self.shardings
            and plan.replication == "ddp"
            and plan.activation_checkpointing in self.levels
            and work.method in self.methods
            and (self.tensor or plan.tp == 1)
            and (self.pipeline or plan.pp == 1)
            and (self.offload or (plan.offload == "none" and plan.offload_parameters == "none"))
            and (self.nodes or plan.device == "cpu" or plan.world_size <= gpus_per_node)
            and (self.images or not work.longest_tiles)
        )


TRAINABLE_NOW = Capabilities(
    shardings=frozenset({"none", "fsdp2"}),
    levels=("none", "full"),
    methods=("full", "lora"),
    tensor=False,
    pipeline=False,
    offload=False,
    nodes=False,
    images=False,
)
EVERYTHING = Capabilities(
    shardings=frozenset({"none", "fsdp2", "zero1", "zero2", "zero3"}),
    levels=("none", "selective", "full"),
    methods=("full", "lora", "qlora"),
    tensor=True,
    pipeline=True,
    offload=True,
    nodes=True,
    images=True,
)
