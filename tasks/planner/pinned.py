"""Pins against what can be trained, the batch and the GPUs, before any plan is made."""

from __future__ import annotations

from tasks.errors import UserError
from tasks.planner.ground import divisors, either
from tasks.planner.problem import Problem


def check_pins(problem: Problem) -> None:
    """Pins against what can be trained, the batch and the GPUs, before any plan is made.

    Raises:
        UserError: a pin cannot be kept.
    """
    _check_trainable(problem)
    pins, batch = problem.pins, problem.batch
    others = (pins.tp or 1) * (pins.pp or 1)
    largest = max(1, problem.most_ranks // others)
    degree = pins.data_parallel
    if degree is not None:
        said = either([divisor for divisor in divisors(batch) if divisor <= largest])
        if batch % degree:
            raise UserError(
                f"data_parallel_degree={degree} does not divide train.global_batch={batch}; use {said}"
            )
        if degree * others > problem.most_ranks:
            beside = f" (beside tp={pins.tp or 1} x pp={pins.pp or 1})" if others > 1 else ""
            raise UserError(
                f"data_parallel_degree={degree} needs a GPU a process, and {largest} can be used here{beside}; "
                f"use {said}"
            )
    factor = (pins.micro_batch or 1) * (pins.accumulation or 1) * (degree or 1)
    if batch % factor:
        raise UserError(
            f"the pinned micro-batch, accumulation and data-parallel degree make {factor}, which does not divide the "
            f"global batch {batch}; leave one of them open"
        )
    if pins.micro_batch and pins.accumulation and degree is None:
        left = batch // factor
        if left * others > problem.most_ranks:
            raise UserError(
                f"per_device_train_batch_size={pins.micro_batch} x gradient_accumulation_steps={pins.accumulation} "
                f"needs data_parallel_degree={left} to make train.global_batch={batch}, but there are {largest} "
                "visible GPU(s); leave one of the two auto"
            )
    _check_sharding(problem)


def _check_sharding(problem: Problem) -> None:
    """fsdp2 needs ranks to share weights out over."""
    pins = problem.pins
    if pins.sharding != "fsdp2" or set(data_parallel_degrees(problem, (pins.tp or 1) * (pins.pp or 1))) - {1}:
        return
    if pins.data_parallel == 1:
        why, way = "data_parallel_degree=1 leaves one", "data_parallel_degree=2 or more"
    elif problem.hardware.device == "cpu":
        why = "a CPU is given one process unless a degree is said"
        way = "data_parallel_degree=2 or more"
    elif problem.most_ranks == 1:
        why, way = "1 GPU can be used here", "more GPUs"
    else:
        why = f"no degree above 1 divides what the other keys leave of train.global_batch={problem.batch}"
        way = "another batch"
    raise UserError(
        f"select_strategy.sharding=fsdp2 shares weights out over two data-parallel ranks or more, and {why}; "
        f"use {way}, or sharding=auto"
    )


def _check_trainable(problem: Problem) -> None:
    pins, can = problem.pins, problem.capabilities
    for name, wished, able in (
        ("tp", pins.tp not in (None, 1), can.tensor),
        ("sequence_parallel", pins.sequence_parallel is True, can.tensor),
        ("pp", pins.pp not in (None, 1), can.pipeline),
        ("schedule", pins.schedule not in (None, "none"), can.pipeline),
    ):
        why = _why_whole(problem) if able else "this version of elastane splits only the batch"
        if wished and why:
            value, alone = getattr(pins, name), {"tp": "1 or auto", "pp": "1 or auto"}.get(name, "auto")
            raise UserError(f"{problem.say(name, value)} cannot be trained: {why}; use {alone}")
    level = pins.activation_checkpointing
    if level not in (None, *can.levels):
        raise UserError(
            f"select_strategy.activation_checkpointing={level} cannot be trained by this version of elastane; "
            f"use {', '.join(can.levels)} or auto"
        )
    if "zero2" not in can.shardings:
        for name in ("engine", "sharding", "offload", "offload_parameters"):
            value = getattr(pins, name) or ""
            if value in ("deepspeed", "cpu", "nvme") or value.startswith("zero"):
                raise UserError(
                    f"{problem.say(name, value)} needs DeepSpeed, which cannot be had here; use auto"
                )


def _why_whole(problem: Problem) -> str | None:
    """Why the model's layers can be neither cut over ranks nor dealt out over stages, or None if they can."""
    can, spec = problem.capabilities, problem.spec
    if can.splits(spec):
        return None
    if not can.split_families:
        return "a model that runs code of its own (model.trust_remote_code) is trained whole or sharded"
    if spec.family in can.split_families:
        return "a model with a vision tower is trained whole or sharded by this version of elastane"
    families = ", ".join(sorted(can.split_families))
    return f"this version of elastane cuts and stages the layers of {families}, and the model's family is {spec.family}"


def data_parallel_degrees(problem: Problem, others: int) -> list[int]:
    """Degrees to try: the pinned one, else all that divide what the other pins leave of the batch.

    On a CPU one process already uses every core, so only a pin asks for more.
    """
    pins = problem.pins
    if pins.data_parallel is not None:
        return [pins.data_parallel]
    left = problem.batch // (pins.micro_batch or 1) // (pins.accumulation or 1)
    if pins.micro_batch and pins.accumulation:
        return [left]
    if problem.hardware.device == "cpu":
        return [1]
    return [degree for degree in divisors(left) if degree * others <= problem.most_ranks]
