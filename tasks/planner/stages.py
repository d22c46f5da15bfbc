"""Which pipeline stage holds what, and how many micro-batches are in flight there."""

from __future__ import annotations

from functools import lru_cache

from tasks.contracts import ModelSpec, Plan
from tasks.planner.model_spec import active_parameters
from tasks.planner.workload import StageSplit


@lru_cache(maxsize=4096)
def layers_of_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Decoder layers of each stage, as even as can be; the first and the last, which also hold the embedding and
    the head, get the fewer where it does not divide.
    """
    least, more = divmod(layers, stages)
    counts = [least] * stages
    middle = sorted(range(stages), key=lambda stage: abs(stage - (stages - 1) / 2))
    for stage in middle[:more]:
        counts[stage] += 1
    return tuple(counts)


@lru_cache(maxsize=4096)
def layers_by_flops(layers: int, stages: int, head_in_layers: float) -> tuple[int, ...]:
    """Layers of each stage when the head counts as `head_in_layers` layers and stages are filled in order.

    A stage takes layers until the running cost reaches its share, as nanotron does (its source, read in 2024).
    """
    total = layers + head_in_layers
    counts, stage = [0] * stages, 0
    for layer in range(layers):
        counts[stage] += 1
        if layer + 1 >= total * (stage + 1) / stages and stage < stages - 1:
            stage += 1
    return tuple(counts)


def stage_layers(spec: ModelSpec, stages: int, split: StageSplit) -> tuple[int, ...]:
    if split == "even" or stages == 1:
        return layers_of_stages(spec.layers, stages)
    head = spec.vocab * spec.hidden
    layer = (active_parameters(spec) - head) / spec.layers
    return layers_by_flops(spec.layers, stages, head / layer)


def in_flight(plan: Plan, stage: int) -> float:
    """Micro-batches whose activations stage `stage` (0 first) holds at once.

    GPipe all of a step; 1F1B min(m, p - stage) (Narayanan et al., arXiv:2104.04473, section 2.2); interleaved with v
    chunks a factor 1 + (p-1)/(pv) more (Korthikanti et al., arXiv:2205.05198, section 4); zero-bubble as 1F1B
    (ZB-H1, arXiv:2401.10241).
    """
    micro_batches, stages = plan.accumulation, plan.pp
    if stages == 1:
        return 1
    if plan.schedule == "gpipe":
        return micro_batches
    held = min(micro_batches, stages - stage)
    if plan.schedule == "interleaved1f1b":
        return min(float(micro_batches), held * (1 + (stages - 1) / (stages * plan.virtual_stages)))
    return held
