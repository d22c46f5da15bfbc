"""What a much simpler planner would say of the same rows: one efficiency a GPU type, and closed-form memory."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence

from benchmarks.planner_accuracy.rows import Case, gpu_kind
from benchmarks.planner_accuracy.score import Answer, by_source, overall
from tasks.planner.model_spec import active_parameters, lora_parameters
from tasks.planner.stages import in_flight

NF4_BYTES = 0.5625  # with a float32 scale a block of 64
LAYER_BYTES = 34.0  # a token and hidden entry of a layer in half precision (arXiv:2205.05198, equation 1)
LOGIT_BYTES = 10.0


def baselines(cases: Sequence[Case], skipped: int) -> dict[str, object]:
    """The planner's own keys for the baselines. Efficiencies are medians of these very rows: of a GPU type, and, to
    be generous, of a GPU type in each source (`efficiency_by_source`).
    """
    by_type = efficiencies(cases, _kind)
    by_both = efficiencies(cases, lambda case: f"{case.source}: {_kind(case)}")
    answers = [_answer(case, by_type.get(_kind(case))) for case in cases]
    generous = [_answer(case, by_both.get(f"{case.source}: {_kind(case)}")) for case in cases]
    return {
        "time": "FLOPs over peak times one efficiency a GPU type: (6N full, 4N LoRA, +2N recomputation) a token",
        "memory": "16 or 18 bytes a parameter over its shards, sb(20h+8f) or 34sbh a layer (2sbh), 10sbV of logits",
        "efficiency": {kind: round(value, 3) for kind, value in sorted(by_type.items())},
        "overall": overall(answers, skipped),
        "sources": by_source(answers),
        "efficiency_by_source": {
            key: value for key, value in overall(generous, skipped).items() if key.startswith("time")
        },
    }


def efficiencies(cases: Sequence[Case], group: Callable[[Case], str]) -> dict[str, float]:
    """The median of reached over peak FLOP/s of each group."""
    reached: dict[str, list[float]] = defaultdict(list)
    for case in cases:
        if case.seconds:
            reached[group(case)].append(ideal_seconds(case) / case.seconds)
    return {name: statistics.median(shares) for name, shares in reached.items()}


def ideal_seconds(case: Case) -> float:
    """A step's FLOPs over the peak of all GPUs; attention is left out, as 6N does."""
    work, plan = case.cost.work, case.plan
    factor = 6.0 if work.method == "full" else 4.0
    factor += 2.0 if plan.activation_checkpointing == "full" else 0.0
    tokens = plan.global_batch * work.mean_row
    return factor * active_parameters(case.cost.spec) * tokens / (case.cost.machine.peak * plan.world_size)


def closed_form_bytes(case: Case) -> float:
    """Bytes of the fuller of the first and last stage's GPUs: states, activations, logits."""
    spec, plan, work = case.cost.spec, case.plan, case.cost.work
    shard = plan.dp_shard
    split = plan.tp * plan.pp
    of_optimizer = shard if plan.sharding != "none" else 1
    of_gradients = shard if plan.sharding in ("zero2", "zero3", "fsdp2") else 1
    of_weights = shard if plan.sharding in ("zero3", "fsdp2") else 1
    gradient = 4.0 if "fp32" in case.row["grad_dtype"] else 2.0
    trained, frozen = float(spec.parameters), 0.0
    if work.method != "full":
        trained = lora_parameters(spec, work.lora_rank, work.lora_targets)
        frozen = spec.parameters * (NF4_BYTES if work.method == "qlora" else 2.0)
    states = (
        (2 * trained + frozen) / of_weights + gradient * trained / of_gradients + 12 * trained / of_optimizer
    )
    tokens = plan.micro_batch * work.sequence
    activations = tokens * _layer_bytes(case) * spec.layers / plan.pp
    logits = LOGIT_BYTES * tokens * spec.vocab / plan.tp
    if plan.pp == 1:
        return states / split + activations + logits
    return states / split + max(activations * in_flight(plan, 0), activations + logits)


def _layer_bytes(case: Case) -> float:
    """A layer's activations a token: 34h, or 20h + 8f with a gated MLP; without sequence parallelism 10h stay whole."""
    spec, plan = case.cost.spec, case.plan
    if plan.activation_checkpointing == "full":
        return 2.0 * spec.hidden
    whole = 20.0 * spec.hidden + 8.0 * spec.ffn if spec.gated_mlp else LAYER_BYTES * spec.hidden
    undivided = 0.0 if plan.sequence_parallel else 10.0 * spec.hidden
    return undivided + (whole - undivided) / plan.tp


def _answer(case: Case, efficiency: float | None) -> Answer:
    needed = closed_form_bytes(case)
    time = None
    if case.seconds and efficiency:
        time = ideal_seconds(case) / efficiency / case.seconds - 1
    memory = None if case.memory is None else needed / case.memory - 1
    return Answer(case, memory, time, needed <= case.cost.machine.gpu_memory)


def _kind(case: Case) -> str:
    return gpu_kind(case.gpu) or case.gpu
