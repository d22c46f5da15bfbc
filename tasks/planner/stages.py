"""Which pipeline rank holds what, how many micro-batches are in flight there, and how long it idles."""

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


def rank_layers(spec: ModelSpec, plan: Plan, split: StageSplit) -> tuple[int, ...]:
    """Decoder layers of each pipeline rank, those of all its model chunks together."""
    if plan.virtual_stages == 1:
        return stage_layers(spec, plan.pp, split)
    return _dealt(
        stage_layers(spec, plan.pp * plan.virtual_stages, split), plan.pp, plan.schedule == "zerobubble"
    )


@lru_cache(maxsize=4096)
def _dealt(chunks: tuple[int, ...], ranks: int, back: bool) -> tuple[int, ...]:
    """Chunks go to the ranks in turn, or (zero-bubble) forth and `back` again."""
    held = [0] * ranks
    for chunk, layers in enumerate(chunks):
        turn, place = divmod(chunk, ranks)
        held[ranks - 1 - place if back and turn % 2 else place] += layers
    return tuple(held)


def last_rank(plan: Plan) -> int:
    """The pipeline rank with the head: under zero-bubble the first, to which the chunks come back."""
    return 0 if plan.schedule == "zerobubble" else plan.pp - 1


def stays_gathered(plan: Plan) -> bool:
    """Whether sharded weights stay whole through a step and gradients whole until its end.

    Beside a pipeline they do: torch.distributed.pipelining reduces gradients after the last micro-batch, and weights
    that are needed for every micro-batch of every chunk are not gathered anew for each.
    """
    return plan.sharding == "fsdp2" and plan.pp > 1


def rounds(micro_batches: int, stages: int) -> int:
    """Rounds in which torch's interleaved schedule works through a step's micro-batches."""
    return max(1, micro_batches // stages)


def in_flight(plan: Plan, rank: int) -> float:
    """Micro-batches whose activations pipeline rank `rank` (0 first) holds at once, in whole models' chunks of a rank.

    GPipe all of a step; 1F1B min(m, p - rank) (Narayanan et al., arXiv:2104.04473, section 2.2). Interleaved with v
    chunks and k micro-batches a round: the (v-1) k + 2 (p - 1 - rank) chunk passes of the warm-up and one more (torch's
    and Megatron's order; p + (p-1)/v on the first rank, Korthikanti et al., arXiv:2205.05198, section 4). Zero-bubble
    (ZBV, arXiv:2401.10241, section 6) as many as p on every rank, once there are that many.
    """
    micro_batches, stages, chunks = plan.accumulation, plan.pp, plan.virtual_stages
    if stages == 1:
        return 1
    if plan.schedule == "gpipe":
        return micro_batches
    if plan.schedule == "interleaved1f1b":
        a_round = micro_batches // rounds(micro_batches, stages)
        return min(micro_batches, ((chunks - 1) * a_round + 2 * (stages - 1 - rank) + 1) / chunks)
    if plan.schedule == "zerobubble":
        return min(micro_batches, (micro_batches + 1 + rank) / 2, stages)
    return min(micro_batches, stages - rank)


def idle(plan: Plan) -> float:
    """Micro-batches that a rank could have computed while it waited for others in a step.

    p - 1 with GPipe and 1F1B, 1/v of it interleaved (arXiv:2104.04473, section 2.2), where fewer micro-batches than
    ranks leave each chunk waiting for the one before; about a third with zero-bubble (arXiv:2401.10241, section 2),
    and more where the few micro-batches leave no weights' gradients to fill the bubble with.
    """
    micro_batches, stages = plan.accumulation, plan.pp
    if plan.schedule == "interleaved1f1b":
        return max(0, stages - micro_batches) + (min(micro_batches, stages) - 1) / plan.virtual_stages
    if plan.schedule == "zerobubble":
        return max((stages - 1) * 2 - (micro_batches - 1), stages - 1) / 3
    return stages - 1
