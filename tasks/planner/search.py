"""Every legal plan of this machine, costed and ranked; a plan that does not fit says why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from tasks.contracts import Candidate, CostEstimate, DataManifest, HardwareProfile, ModelSpec, Plan, Resolved
from tasks.errors import UserError
from tasks.params import SelectStrategyParams, TrainParams, global_batch
from tasks.planner.explain import gib, largest_terms, settings, too_large
from tasks.planner.memory import memory
from tasks.planner.time import seconds

Checkpointing = Literal["none", "full"]
NEAR_TIE = 1.02


@dataclass(frozen=True)
class Problem:
    """What one search is about."""

    spec: ModelSpec
    hardware: HardwareProfile
    train: TrainParams
    strategy: SelectStrategyParams
    manifest: DataManifest
    resolved: Resolved


def search(
    spec: ModelSpec,
    hardware: HardwareProfile,
    train: TrainParams,
    strategy: SelectStrategyParams,
    manifest: DataManifest,
    resolved: Resolved,
) -> tuple[Candidate, ...]:
    """All legal candidates: first those that fit, best first, then the rejected.

    Every plan keeps micro_batch x accumulation x data-parallel degree = train.global_batch.

    Raises:
        UserError: a pinned value breaks a rule, there are no rows, or nothing fits.
    """
    if not manifest.train.rows:
        raise UserError("the training split has 0 rows, and at least 1 is needed; mend prepare_data.source")
    problem = Problem(spec, hardware, train, strategy, manifest, resolved)
    costed = [(plan, _estimate(problem, plan)) for plan in _plans(problem)]
    fitting = _ranked([(plan, cost) for plan, cost in costed if _fits(cost)])
    if not fitting:
        raise UserError(_nothing_fits(problem, costed))
    unfit = sorted(
        ((plan, cost) for plan, cost in costed if not _fits(cost)), key=lambda pair: pair[1].total_bytes
    )
    return tuple(Candidate(plan=plan, estimate=cost, rejected=None) for plan, cost in fitting) + tuple(
        Candidate(plan=plan, estimate=cost, rejected=too_large(plan, cost, [kept for kept, _ in fitting]))
        for plan, cost in unfit
    )


# --- legal plans --------------------------------------------------------------------------------


def _plans(problem: Problem) -> Iterator[Plan]:
    strategy, hardware = problem.strategy, problem.hardware
    _check_axes(strategy)
    _check_degree(problem.train, strategy, hardware)
    batch = global_batch(problem.train, strategy)
    backend = _backend(strategy, hardware)
    levels: tuple[Checkpointing, ...] = ("none", "full")
    if strategy.activation_checkpointing != "auto":
        levels = (strategy.activation_checkpointing,)
    for degree in _data_parallel_degrees(strategy, hardware, batch):
        for micro, level in product(_divisors(batch // degree), levels):
            accumulation = batch // degree // micro
            if strategy.per_device_train_batch_size not in ("auto", micro):
                continue
            if strategy.gradient_accumulation_steps not in ("auto", accumulation):
                continue
            yield Plan(
                engine="torch",
                device=hardware.device,
                backend=backend,
                dp_replicate=degree,
                dp_shard=1,
                tp=1,
                pp=1,
                schedule="none",
                micro_batch=micro,
                accumulation=accumulation,
                activation_checkpointing=level,
                offload="none",
            )


def _check_axes(strategy: SelectStrategyParams) -> None:
    for key in ("tensor_parallel_degree", "pipeline_parallel_degree"):
        degree = getattr(strategy, key)
        if degree not in ("auto", 1):
            raise UserError(
                f"select_strategy.{key}={degree} cannot be trained: this version of elastane splits only the batch, "
                f"so the degree must be 1; use {key}=1 or auto"
            )


def _check_degree(train: TrainParams, strategy: SelectStrategyParams, hardware: HardwareProfile) -> None:
    """A pinned data-parallel degree against the batch and the GPUs, before any other factor of the batch."""
    degree = strategy.data_parallel_degree
    if degree == "auto":
        return
    batch = degree if train.global_batch == "auto" else train.global_batch
    largest = _most_ranks(hardware, batch)
    usable = [str(divisor) for divisor in _divisors(batch) if divisor <= largest]
    said = f"{', '.join(usable[:-1])} or {usable[-1]}" if len(usable) > 1 else usable[0]
    if batch % degree:
        raise UserError(
            f"data_parallel_degree={degree} does not divide train.global_batch={batch}; use {said}"
        )
    if degree > largest:
        raise UserError(
            f"data_parallel_degree={degree} needs a GPU a process, and {largest} can be used here; use {said}"
        )


def _most_ranks(hardware: HardwareProfile, batch: int) -> int:
    return len(hardware.gpus) if hardware.device == "cuda" else batch


def _backend(strategy: SelectStrategyParams, hardware: HardwareProfile) -> Literal["nccl", "gloo"]:
    if strategy.ddp_backend == "auto":
        return "nccl" if hardware.device == "cuda" else "gloo"
    if strategy.ddp_backend == "nccl" and hardware.device == "cpu":
        raise UserError(
            "select_strategy.ddp_backend=nccl needs CUDA GPUs, and training is on the CPU here; use gloo or auto"
        )
    return strategy.ddp_backend


def _data_parallel_degrees(
    strategy: SelectStrategyParams, hardware: HardwareProfile, batch: int
) -> list[int]:
    """Degrees to try: the pinned one, else on GPUs all that divide what the other pins leave of the batch.

    On a CPU one process already uses every core, so only a pin asks for more.
    """
    if strategy.data_parallel_degree != "auto":
        return [strategy.data_parallel_degree]
    largest = _most_ranks(hardware, batch)
    micro, accumulation = strategy.per_device_train_batch_size, strategy.gradient_accumulation_steps
    left = batch // (1 if micro == "auto" else micro) // (1 if accumulation == "auto" else accumulation)
    if micro != "auto" and accumulation != "auto":
        degrees = [left]  # both pinned: the product rule leaves one degree
    elif hardware.device == "cpu":
        degrees = [1]
    else:
        degrees = _divisors(left)
    possible = [degree for degree in degrees if degree <= largest]
    if not possible:
        raise UserError(
            f"per_device_train_batch_size={micro} x gradient_accumulation_steps={accumulation} needs "
            f"data_parallel_degree={left} to make train.global_batch={batch}, but there are {largest} visible GPU(s); "
            "leave one of the two auto"
        )
    return possible


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


# --- cost and rank ------------------------------------------------------------------------------


def memory_limit(hardware: HardwareProfile, strategy: SelectStrategyParams, plan: Plan) -> int:
    """Bytes one rank may use: of the smallest GPU, or its share of host memory, less the margin."""
    if hardware.device == "cuda":
        whole = min(gpu.memory_bytes for gpu in hardware.gpus)
    else:
        whole = hardware.host_memory_bytes // plan.world_size
    return int(whole * (1 - strategy.memory_margin))


def _estimate(problem: Problem, plan: Plan) -> CostEstimate:
    rows = problem.manifest.train
    mean_row = rows.tokens / rows.rows
    precision = problem.resolved.precision
    spent = seconds(problem.spec, plan, problem.train, problem.hardware, precision, mean_row)
    return CostEstimate(
        memory_bytes=memory(problem.spec, plan, problem.train, precision, rows.longest),
        memory_limit_bytes=memory_limit(problem.hardware, problem.strategy, plan),
        seconds=spent,
        tokens_per_second=plan.global_batch * mean_row / sum(spent.values()),
    )


def _fits(cost: CostEstimate) -> bool:
    return cost.total_bytes <= cost.memory_limit_bytes


def _ranked(costed: Sequence[tuple[Plan, CostEstimate]]) -> list[tuple[Plan, CostEstimate]]:
    """Fastest first; within 2 % of the fastest left, no recomputing, then fewer bytes, then fewer processes."""
    left = sorted(costed, key=lambda pair: pair[1].total_seconds)
    ranked = []
    while left:
        near = [pair for pair in left if pair[1].total_seconds <= left[0][1].total_seconds * NEAR_TIE]
        best = min(
            near,
            key=lambda pair: (
                pair[0].activation_checkpointing != "none",
                pair[1].total_bytes,
                pair[0].world_size,
            ),
        )
        ranked.append(best)
        left.remove(best)
    return ranked


# --- when nothing fits --------------------------------------------------------------------------


def _nothing_fits(problem: Problem, costed: Sequence[tuple[Plan, CostEstimate]]) -> str:
    plan, cost = min(costed, key=lambda pair: pair[1].total_bytes - pair[1].memory_limit_bytes)
    where = "GPU" if plan.device == "cuda" else "process"
    return (
        f"no plan fits: {problem.train.finetuning_type} fine-tuning of this {problem.spec.parameters / 1e9:.2f} B "
        f"parameter model needs {gib(cost.total_bytes)} GiB of {gib(cost.memory_limit_bytes)} GiB a {where} "
        f"(select_strategy.memory_margin={problem.strategy.memory_margin:g} kept free) even as {settings(plan)} "
        f"({largest_terms(cost)}); {_way_out(problem)}"
    )


def _way_out(problem: Problem) -> str:
    """The first change that would make it fit: dropping the pins, then LoRA; else what shrinks it."""
    free = problem.strategy.model_copy(
        update={
            "per_device_train_batch_size": "auto",
            "gradient_accumulation_steps": "auto",
            "activation_checkpointing": "auto",
            "data_parallel_degree": "auto",
        }
    )
    batch = global_batch(problem.train, problem.strategy)
    train = problem.train.model_copy(update={"global_batch": batch})
    everywhere = train.lora.model_copy(update={"targets": "all-linear"})
    lora = train.model_copy(update={"finetuning_type": "lora", "lora": everywhere})
    for change, method in (
        ("leave those keys of select_strategy auto", train),
        ("use train.finetuning_type=lora", lora),
    ):
        other = Problem(problem.spec, problem.hardware, method, free, problem.manifest, problem.resolved)
        fitting = [(plan, cost) for plan in _plans(other) if _fits(cost := _estimate(other, plan))]
        if fitting:
            plan, cost = _ranked(fitting)[0]
            return f"{change}, which fits as {settings(plan)} with {gib(cost.total_bytes)} GiB"
    return (
        "use a smaller model, a smaller prepare_data.max_length "
        f"(longest row: {problem.manifest.train.longest} tokens) or a device with more memory"
    )
