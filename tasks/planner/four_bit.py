"""The rule of plans that split a base held in 4 bits."""

from __future__ import annotations

from tasks.contracts import ModelSpec, Plan
from tasks.planner.ground import Ground, either, tensor_degrees
from tasks.planner.workload import NF4_BLOCK


def qlora_is_cut_between_blocks(plan: Plan, ground: Ground) -> str | None:
    if ground.work.method != "qlora":
        return None
    if plan.engine == "deepspeed":
        return (
            f"{plan.sharding} with qlora is not trained: DeepSpeed shares out float weights, and 4-bit ones are packed "
            "bytes with scales beside them; use fsdp2 or sharding=none, or lora"
        )
    if torn := torn_block(ground.spec, plan.tp):
        name, width = torn
        degrees = tensor_degrees(ground.spec, ground.a_node)
        use = either(degree for degree in degrees if not torn_block(ground.spec, degree))
        return (
            f"tp={plan.tp} with qlora cuts {name}={width} into parts of {width // plan.tp}, which would tear apart "
            f"{NF4_BLOCK} weights that share a scale; use tp={use}, or lora"
        )
    return None


def torn_block(spec: ModelSpec, tp: int) -> tuple[str, int] | None:
    """(name, width) of what tensor parallelism would cut inside a block of NF4, where it can be cut evenly at all.

    Blocks follow the flattened matrix: a part is columns of the matrices that leave attention and MLP, and rows of all
    others, `hidden` wide each.
    """
    if tp == 1:
        return None
    for name, width, a_row in (
        ("num_attention_heads x head_dim", spec.heads * spec.head_dim, 1),
        ("intermediate_size", spec.ffn, 1),
        ("num_key_value_heads x head_dim", spec.kv_heads * spec.head_dim, spec.hidden),
    ):
        if width // tp * a_row % NF4_BLOCK:
            return name, width
    return None
