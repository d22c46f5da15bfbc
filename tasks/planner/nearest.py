"""Why a plan does not fit, and the nearest thing that would."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from math import ceil

from tasks.contracts import Candidate, CostEstimate, Plan
from tasks.errors import UserError
from tasks.optimizers import OPTIMIZERS
from tasks.planner.legal import RULES, broken
from tasks.planner.memory import GIB
from tasks.planner.problem import Pins, Problem
from tasks.planner.space import RuledOut, complexity, layouts, levels, micro_batches
from tasks.planner.words import excess, gib, largest_terms, moment, settings, shortage, terms
from tasks.planner.workload import Method

SHORTEST = 128  # tokens; halving rows stops here
MOST_NODES = 8
MOST_HOST = 4096 * GIB  # bytes of host memory that a node may be wished for
A_NODE = 8
WAYS = 3
LIGHTER: dict[Method, tuple[Method, ...]] = {"full": ("lora", "qlora"), "lora": ("qlora",), "qlora": ()}


class NothingFits(UserError):
    """Every legal plan needs too much memory; a pin that breaks a rule is a plain UserError."""


def too_large(problem: Problem, plan: Plan, cost: CostEstimate, fitting: Sequence[Plan]) -> str:
    """What there is too little of, by how much, and the plan nearest to this one that fits."""

    def distance(other: Plan) -> tuple[bool, bool, bool, bool, int]:
        return (
            (other.offload, other.offload_parameters) != (plan.offload, plan.offload_parameters),
            (other.tp, other.pp) != (plan.tp, plan.pp),
            (other.dp_replicate, other.sharding) != (plan.dp_replicate, plan.sharding),
            other.activation_checkpointing != plan.activation_checkpointing,
            abs(other.micro_batch - plan.micro_batch),
        )

    return f"{shortage(cost, plan.device)}; fits as {settings(min(fitting, key=distance))}"


def with_neighbours(problem: Problem, rejected: Sequence[Candidate], count: int) -> list[Candidate]:
    """The first `count` rejections also say under which other method, length or number of ranks they would fit."""
    told = list(rejected)
    for index, candidate in enumerate(told[:count]):
        ways = list(_neighbours(problem, candidate.plan))
        if ways:
            sentence = f"{candidate.rejected}; this plan itself would fit {', or '.join(ways[:WAYS])}"
            told[index] = candidate.model_copy(update={"rejected": sentence})
    return told


def _neighbours(problem: Problem, plan: Plan) -> Iterator[str]:
    def fits(changed: Problem, other: Plan) -> bool:
        return broken(other, changed.ground, RULES) is None and changed.cost.fits(
            changed.cost.estimate(other)
        )

    for method in _methods(problem):
        changed = problem.changed(work=replace(problem.work, method=method))
        if fits(changed, plan):
            yield f"with {method}"
            break
    for sequence in _lengths(problem):
        changed = _shorter(problem, sequence)
        if fits(changed, plan):
            yield f"at {problem.say('sequence', sequence)}"
            break
    growing = plan.device == "cuda" and plan.dp_shard > 1 and plan.accumulation > 1
    for factor in (2, 4, 8) if growing else ():
        if plan.accumulation % factor == 0:
            more = {"dp_shard": plan.dp_shard * factor, "accumulation": plan.accumulation // factor}
            changed = _grown(problem, plan.world_size * factor)
            other = plan.model_copy(update=more)
            if fits(changed, other):
                yield f"as {other.name} on {other.world_size} GPUs"
                break


def nothing_fits(problem: Problem, unfit: Sequence[tuple[Plan, CostEstimate]]) -> str:
    """The one sentence when no plan fits: the nearest, what it lacks, and the ways out."""
    plan, cost = min(unfit, key=lambda pair: excess(pair[1], pair[0].device))
    where = "GPU" if plan.device == "cuda" else "process"
    host = sum(cost.host_bytes.values())
    if cost.peak_bytes > cost.memory_limit_bytes:
        need = (
            f"needs {gib(cost.peak_bytes)} GiB of {gib(cost.memory_limit_bytes)} GiB a {where} {moment(cost)} "
            f"(select_strategy.memory_margin={problem.margin:g} kept free) even as {settings(plan)} ({terms(cost)})"
        )
    else:
        need = (
            f"needs {gib(host)} GiB of {gib(cost.host_limit_bytes)} GiB host memory a node even as {settings(plan)} "
            f"({largest_terms(cost.host_bytes)})"
        )
    ways = _ways_out(problem, unfit)
    if not ways:
        ways = [
            f"use a smaller model, rows shorter than {problem.say('sequence', problem.work.sequence)} tokens or a "
            "device with more memory"
        ]
    return (
        f"no plan fits: {problem.work.method} fine-tuning of this {problem.spec.parameters / 1e9:.2f} B "
        f"parameter model {need}; {', or '.join(ways[:WAYS])}"
    )


def _more_host_memory(
    problem: Problem, unfit: Sequence[tuple[Plan, CostEstimate]]
) -> Iterator[tuple[str, Problem]]:
    """The least host memory of a node with which a plan would fit whose GPUs have room enough, up to MOST_HOST."""
    if problem.hardware.device == "cpu":
        return
    needs = [sum(cost.host_bytes.values()) for _, cost in unfit if cost.peak_bytes <= cost.memory_limit_bytes]
    if needs and (room := ceil(min(needs) / (1 - problem.margin) / GIB)) * GIB <= MOST_HOST:
        hardware = problem.hardware.model_copy(update={"host_memory_bytes": room * GIB})
        yield f"give the node {room} GiB of host memory", problem.changed(hardware=hardware)


def _ways_out(problem: Problem, unfit: Sequence[tuple[Plan, CostEstimate]]) -> list[str]:
    """Changes that would make it fit: fewer pins, a lighter method, more host memory, more GPUs, shorter rows."""

    def told(text: str, changed: Problem) -> str | None:
        try:
            found = first_fit(changed)
        except UserError:  # with this pin open, another one breaks a rule
            return None
        if found is None:
            return None
        plan, cost = found
        return f"{text}, which fits as {settings(plan)} with {gib(cost.peak_bytes)} GiB"

    free = problem.changed(pins=Pins(gpus=problem.pins.gpus, backend=problem.pins.backend))
    ways: list[str | None] = []
    if problem.evaluation_rows > 1:
        ways.append(told(_use(problem, "evaluation_rows", 1), problem.changed(evaluation_rows=1)))
    if ways and ways[0]:
        return [ways[0]]
    quick = replace(problem.capabilities, offload=False)
    fewer = _first(_fewer_pins(problem.changed(capabilities=quick)), lambda pair: told(*pair))
    fewer = fewer or _first(_fewer_pins(problem), lambda pair: told(*pair))
    if fewer:
        return [fewer]
    ways += [told(*change) for change in _freer_recipes(free)]
    for method in _methods(problem):
        changed = free.changed(work=replace(problem.work, method=method, lora_targets="all-linear"))
        ways.append(told(_use(problem, "method", method), changed))
        if ways[-1]:
            break
    ways.append(_first(_more_host_memory(problem, unfit), lambda pair: told(*pair)))
    ways.append(_first(_more_gpus(free), lambda pair: told(*pair)))
    lengths = ((_use(problem, "sequence", n), _shorter(free, n)) for n in _lengths(problem))
    ways.append(_first(lengths, lambda pair: told(*pair)))
    return [way for way in ways if way]


def _freer_recipes(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """The same recipe without what keeps plans out that share parameters."""
    work = problem.work
    if work.communication_hook != "none":
        whole = problem.changed(work=replace(work, communication_hook="none"))
        yield _use(problem, "communication_hook", "none"), whole
    if not OPTIMIZERS[work.optim].any_cut:
        shared = problem.changed(work=replace(work, optim="adamw_torch"))
        yield _use(problem, "optim", "adamw_torch"), shared


def _use(problem: Problem, name: str, value: object) -> str:
    return f"{'use' if name in problem.options else 'set'} {problem.say(name, value)}"


def _fewer_pins(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """The same with one pin left open, with two, with none kept; in the words in which they were said."""
    said = dict(reversed(problem.pins.said.items()))
    for size in sorted({1, 2, len(said)}):
        for names in combinations(said, size):
            options = [problem.say(name, said[name]) for name in names if name in problem.options]
            keys = [problem.say(name, "auto") for name in names if name not in problem.options]
            words = [f"leave out {' and '.join(options)}"] if options else []
            words += [f"set {' and '.join(keys)}"] if keys else []
            yield " and ".join(words), problem.changed(pins=replace(problem.pins, **dict.fromkeys(names)))


def _first(
    changes: Iterator[tuple[str, Problem]], told: Callable[[tuple[str, Problem]], str | None]
) -> str | None:
    return next((said for change in changes if (said := told(change))), None)


def first_fit(problem: Problem) -> tuple[Plan, CostEstimate] | None:
    """The simplest plan that fits, with the smallest micro-batch and the most recomputing; None if there is none."""
    for layout in sorted(layouts(problem, RuledOut()), key=complexity):
        smallest = next(iter(micro_batches(problem, layout)), None)
        if smallest is None:
            continue
        plan = smallest.model_copy(update={"activation_checkpointing": levels(problem, layout)[-1]})
        cost = problem.cost.estimate(plan)
        if problem.cost.fits(cost):
            return plan, cost
    return None


def _methods(problem: Problem) -> tuple[Method, ...]:
    """Methods that need less than this one, and that can be had."""
    lighter = LIGHTER[problem.work.method]
    if problem.hardware.device == "cpu":
        lighter = tuple(method for method in lighter if method != "qlora")
    return tuple(method for method in lighter if method in problem.capabilities.methods)


def _lengths(problem: Problem) -> Iterator[int]:
    sequence = problem.work.sequence // 2
    while sequence >= SHORTEST and not problem.work.longest_tiles:
        yield sequence
        sequence //= 2


def _shorter(problem: Problem, sequence: int) -> Problem:
    work = problem.work
    return problem.changed(work=replace(work, sequence=sequence, mean_row=min(work.mean_row, sequence)))


def _more_gpus(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Twice as many GPUs again and again: to a full node of eight, then nodes up to MOST_NODES."""
    gpus = problem.hardware.gpu_count
    if problem.hardware.device == "cpu" or "fsdp2" not in problem.capabilities.shardings:
        return
    while gpus * 2 <= A_NODE * MOST_NODES:
        gpus *= 2
        yield f"use {gpus} such GPUs", _grown(problem, gpus)


def _grown(problem: Problem, gpus: int) -> Problem:
    """The same cards in a larger machine; what they share grows with them."""
    hardware = problem.hardware
    here = len(hardware.gpus)
    a_node = max(here, min(gpus, A_NODE))
    larger = hardware.model_copy(
        update={
            "gpus": (hardware.gpus[0],) * a_node,
            "links": hardware.links if a_node == here else (),
            "host_memory_bytes": hardware.host_memory_bytes // here * a_node,
            "nodes": max(hardware.nodes, -(-gpus // a_node)),
        }
    )
    return problem.changed(hardware=larger, pins=replace(problem.pins, gpus=None))
