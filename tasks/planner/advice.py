"""What to watch and what to change, from the predicted cost: sentences, each with its rule."""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt

from tasks.contracts import Candidate, CostEstimate, Plan, TrainPerformance
from tasks.planner.activations import FLOAT32
from tasks.planner.memory import trainable_parameters
from tasks.planner.problem import Problem

TRAFFIC = ("communication", "tensor_parallel", "pipeline")
DEAR = 0.25  # share of a step from which a term is worth a word
# Mean time between failures of one GPU's share of a cluster. Meta counted 419 unexpected stops in 54 days on 16,384
# GPUs (The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.4): one in some 50,000 GPU hours.
GPU_HOURS_A_FAILURE = 50_000
ROWS_A_CORE = 300.0  # rows/s a core tokenises and pads; assumed, modest
TILES_A_CORE = 25.0  # image tiles/s a core decodes and scales; assumed, modest


def advice(problem: Problem, chosen: Candidate, measured: TrainPerformance | None = None) -> Iterator[str]:
    """Sentences on traffic, bubble, loader, checkpoints and learning rate for a chosen plan.

    `measured` is what a run of it took, where there was one: its waiting for data replaces the estimate.
    """
    cost = chosen.estimate
    assert cost is not None, "a chosen plan has a cost"
    yield from _traffic(chosen.plan, cost)
    yield from _bubble(chosen.plan, cost)
    yield from _loader(problem, chosen.plan, cost, measured)
    yield from _checkpoints(problem, chosen.plan)
    yield from _learning_rate(problem, chosen.plan)


def _traffic(plan: Plan, cost: CostEstimate) -> Iterator[str]:
    spent = {name: cost.seconds.get(name, 0.0) / cost.total_seconds for name in TRAFFIC}
    share = sum(spent.values())
    if share <= DEAR:
        return
    worst = max(spent, key=lambda name: spent[name])
    way = {
        "communication": "a larger global batch (more accumulation a step), fewer ranks, a faster network",
        "tensor_parallel": "a smaller tp and a larger pp or sharding, since tp sends in every layer",
        "pipeline": "fewer stages, or fewer model chunks a stage",
    }[worst]
    yield (
        f"communication dominates: {share:.0%} of a step is traffic that hides behind nothing ({worst} "
        f"{spent[worst]:.0%}); what helps is {way}"
    )


def _bubble(plan: Plan, cost: CostEstimate) -> Iterator[str]:
    share = cost.seconds.get("bubble", 0.0) / cost.total_seconds
    if share > DEAR:
        yield (
            f"the pipeline idles {share:.0%} of a step: {plan.accumulation} micro-batches over pp={plan.pp} are few; "
            "a larger global batch or a smaller pp fills it"
        )


def _loader(
    problem: Problem, plan: Plan, cost: CostEstimate, measured: TrainPerformance | None
) -> Iterator[str]:
    if measured is not None:
        waits = max((rank.data_wait for rank in measured.ranks), default=0.0)
        if waits > 0.1:
            yield f"the loader starves the GPU: {waits:.0%} of a step went to waiting for rows; give it more CPU cores"
        return
    rows = cost.tokens_per_second / max(1.0, problem.work.mean_row)
    nodes = max(1, -(-plan.world_size // max(1, len(problem.hardware.gpus))))
    cores = problem.hardware.cpu_cores * nodes
    needed = rows / ROWS_A_CORE + rows * problem.work.tiles / TILES_A_CORE
    if plan.device == "cuda" and needed > cores / 2:
        yield (
            f"the loader may starve the GPUs: {rows:,.0f} rows/s take about {needed:,.0f} cores of {cores}; "
            "prepare the data beforehand, or give the loader more cores"
        )


def save_seconds(problem: Problem, plan: Plan) -> float:
    """Seconds to write a checkpoint: trained weights and two moments in float32, shared out over the nodes' disks."""
    size = 3 * FLOAT32 * trainable_parameters(problem.spec, problem.work)
    nodes = max(1, -(-plan.world_size // max(1, len(problem.hardware.gpus))))
    return size / (problem.machine.disk * nodes)


def _checkpoints(problem: Problem, plan: Plan) -> Iterator[str]:
    """Young's interval sqrt(2 x time between failures x time of a save) (CACM 17(9), 1974; Daly, FGCS 22, 2006)."""
    if plan.device == "cpu":
        return
    between = GPU_HOURS_A_FAILURE * 3600 / plan.world_size
    save = save_seconds(problem, plan)
    best = sqrt(2 * between * save)
    yield (
        f"checkpoints: a save takes about {save:.1f} s, and one every {_duration(best)} costs least by Young's rule "
        f"(failure of one of {plan.world_size} GPU(s) about every {_duration(between)}); "
        "train.checkpoint_every_seconds bounds what is lost"
    )


def _learning_rate(problem: Problem, plan: Plan) -> Iterator[str]:
    """AdamW's second moment forgets in some 1/(1 - beta2) steps; twice as many need no tuning (arXiv:1910.04209).

    Of other optimizers there is nothing to say.
    """
    if not problem.work.optim.startswith("adamw"):
        return
    if plan.device == "cuda":
        yield (
            "warm-up: 2 / (1 - train.adam_beta2) steps are enough for AdamW (2,000 at 0.999); a run shorter than some "
            "20,000 steps takes a share instead, 3 to 10 % (train.warmup_ratio)"
        )
    if plan.data_parallel > 1:
        yield (
            f"learning rate: leave it, since {plan.data_parallel} ranks share the same global batch of "
            f"{problem.batch}. Only if you make the batch k times larger, sqrt(k) times the rate is usual "
            "for AdamW, k times for SGD (linear), with warm-up lengthened to as many samples as before"
        )


def _duration(seconds: float) -> str:
    for size, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
