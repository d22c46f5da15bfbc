"""Every legal plan, costed and ranked; a plan that does not fit or may not be says why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from tasks.contracts import Candidate, CostEstimate, Plan
from tasks.errors import UserError
from tasks.planner.compute import model_flops
from tasks.planner.legal import COMPILING, STEP, broken
from tasks.planner.nearest import NothingFits, nothing_fits, too_large, with_neighbours
from tasks.planner.problem import COMPILE_SECONDS, WORDS, Problem
from tasks.planner.space import RuledOut, complexity, layouts, levels, micro_batches
from tasks.planner.words import excess

NEAR_TIE = 1.02
FEW = 64  # layouts up to which every micro-batch and level is costed
KEPT = 60  # plans that fit that are told one by one where there are many
NEIGHBOURS = 6  # rejections for which other methods, GPUs and lengths are tried
HOPELESS = 1.3  # layouts slower than so many times the best even at the data sheet's peak are not costed

Costed = tuple[Plan, CostEstimate]


@dataclass
class Found:
    """What a search saw. `fitting` best first, of many the best KEPT; of `rejected` first the nearest of each kind.

    `rejected` has all that need too much memory: the smallest such micro-batch of a layout and level stands for the
    larger ones. `fit` and `unfit` count them;
    `hopeless` layouts would be far slower even at the peak rate and were not costed; `ruled_out` broke a rule, one
    plan a sentence.
    """

    fitting: list[Candidate] = field(default_factory=list)
    rejected: list[Candidate] = field(default_factory=list)
    ruled_out: list[Candidate] = field(default_factory=list)
    fit: int = 0
    unfit: int = 0
    hopeless: int = 0

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return (*self.fitting, *self.rejected, *self.ruled_out)


def search(problem: Problem) -> Found:
    """All legal plans of this machine: micro_batch x accumulation x data-parallel degree is always the global batch.

    Raises:
        NothingFits: every legal plan needs too much memory.
        UserError: a pinned value breaks a rule.
    """
    ruled_out = RuledOut()
    found = legal_layouts(problem, ruled_out)
    fitting, unfit, hopeless = _cost_all(problem, found)
    may = problem.capabilities.offload and problem.capabilities.disk
    if not fitting and may and problem.hardware.device == "cuda":
        on_disk = (plan for plan in layouts(problem, RuledOut(), nvme=True) if plan.offload == "nvme")
        fitting, more, _ = _cost_all(problem, list(on_disk))
        unfit += more
    if not fitting and not unfit:
        raise UserError(
            next(_without_step(problem, found), "no micro-batch is as pinned; leave some pins open")
        )
    if not fitting:
        raise NothingFits(nothing_fits(problem, unfit))
    ranked = _ranked(problem, fitting)
    kept = [plan for plan, _ in ranked]
    rejected = [
        Candidate(plan=plan, estimate=cost, rejected=too_large(problem, plan, cost, kept))
        for plan, cost in _told(unfit)
    ]
    return Found(
        fitting=[Candidate(plan=plan, estimate=cost, rejected=None) for plan, cost in ranked],
        rejected=with_neighbours(problem, rejected, NEIGHBOURS),
        ruled_out=[
            Candidate(plan=plan, estimate=None, rejected=why)
            for why, plan in {why: plan for plan, why in ruled_out.values()}.items()
        ],
        fit=len(fitting),
        unfit=len(unfit),
        hopeless=hopeless,
    )


def legal_layouts(problem: Problem, ruled_out: RuledOut) -> list[Plan]:
    """All layouts as pinned.

    Raises:
        UserError: there are none; the rule that stands against it.
    """
    found = list(layouts(problem, ruled_out))
    if not found:
        said = next(_faults(problem, ruled_out), "no legal plan is as pinned; leave some of the pins open")
        raise UserError(said)
    return found


def _faults(problem: Problem, ruled_out: RuledOut) -> Iterator[str]:
    """Why no plan is as pinned: the rule that such a plan breaks, else that of a plan made so, else any."""
    pins = problem.pins
    level = {"activation_checkpointing": pins.activation_checkpointing or "none"}
    for (rule, *_), (plan, sentence) in ruled_out.items():
        # A plan that breaks the rule of sequence parallelism goes on without it.
        if rule != "sequence_parallel" and pins.allow(plan.model_copy(update=level)):
            yield sentence
    wished = {name: value for name in WORDS if (value := getattr(pins, name)) is not None}
    if pins.sharding is not None:
        wished.setdefault("engine", "deepspeed" if pins.sharding.startswith("zero") else "torch")
    opened = problem.changed(pins=replace(pins, **dict.fromkeys(WORDS)))

    def changes(plan: Plan) -> int:
        return sum(getattr(plan, name) != value for name, value in wished.items())

    for plan in sorted(layouts(opened, RuledOut()), key=changes):
        if fault := broken(plan.model_copy(update=wished), problem.ground):
            yield fault.sentence
    yield from (sentence for _, sentence in ruled_out.values())


def _without_step(problem: Problem, found: list[Plan]) -> Iterator[str]:
    """Why no pinned micro-batch goes with the layouts: the rule of their schedule."""
    pins = problem.pins
    for layout in found:
        share = problem.batch // layout.data_parallel
        micro = pins.micro_batch or share // (pins.accumulation or share)
        step = layout.model_copy(
            update={"micro_batch": micro, "accumulation": max(1, share // max(1, micro))}
        )
        if fault := broken(step, problem.ground, STEP):
            yield fault.sentence


# --- cost ---------------------------------------------------------------------------------------


def _cost_all(problem: Problem, found: list[Plan]) -> tuple[list[Costed], list[Costed], int]:
    """Plans that fit, the first of each layout and level that does not, and how many layouts were hopeless."""
    fitting: list[Costed] = []
    unfit: list[Costed] = []
    hopeless, best = 0, float("inf")
    thorough = len(found) <= FEW
    flops = model_flops(problem.spec, problem.work) * problem.batch
    for layout in sorted(found, key=lambda plan: -plan.world_size):
        ideal = flops / (problem.machine.peak * layout.world_size)
        if not thorough and ideal > HOPELESS * best:
            hopeless += 1
            continue
        for plan, cost, fits in _cost_layout(problem, layout, thorough):
            if fits:
                fitting.append((plan, cost))
                best = min(best, problem.step_seconds(plan, cost))
            else:
                unfit.append((plan, cost))
    return fitting, unfit, hopeless


def _cost_layout(problem: Problem, layout: Plan, thorough: bool) -> Iterable[tuple[Plan, CostEstimate, bool]]:
    """Every micro-batch up to the first that does not fit, level by level.

    More recomputing is only tried for micro-batches that are too large without, unless `thorough`.
    """
    model = problem.cost
    done = 0
    for level in levels(problem, layout):
        for sized in micro_batches(problem, layout):
            if sized.micro_batch <= done and not thorough:
                continue
            plan = sized.model_copy(update={"activation_checkpointing": level})
            plan, cost = _compiled_if_it_pays(problem, plan, model.estimate(plan))
            fits = model.fits(cost)
            yield plan, cost, fits
            if not fits:
                break
            done = max(done, plan.micro_batch)


def _compiled_if_it_pays(problem: Problem, plan: Plan, cost: CostEstimate) -> Costed:
    """The plan, with compiled layers if what that saves over the run's steps is more than compiling takes."""
    steps, model = problem.steps, problem.cost
    if steps is None or problem.pins.compiled is not None or steps * cost.total_seconds <= COMPILE_SECONDS:
        return plan, cost
    other = plan.model_copy(update={"compiled": True})
    may_fit = model.fits(cost) or model.software.compiled_memory
    if not may_fit or broken(other, problem.ground, COMPILING):
        return plan, cost
    compiled = model.compiled(other, cost)
    pays = problem.step_seconds(other, compiled) < cost.total_seconds
    return (other, compiled) if pays and model.fits(compiled) else (plan, cost)


def _told(unfit: list[Costed]) -> list[Costed]:
    """The nearest to fitting of each kind of plan, the plain kinds first, and then the other near ones."""
    near = sorted(unfit, key=lambda pair: excess(pair[1], pair[0].device))
    kinds: dict[tuple[object, ...], Costed] = {}
    for pair in near:
        plan = pair[0]
        kinds.setdefault((plan.sharding, plan.offload, plan.tp > 1, plan.pp > 1), pair)
    heads = sorted(kinds.values(), key=lambda pair: complexity(pair[0]))
    shown = {id(pair) for pair in heads}
    return heads + [pair for pair in near if id(pair) not in shown]


# --- rank ---------------------------------------------------------------------------------------


def _simpler(pair: Costed) -> tuple[int, int, int, int]:
    plan, cost = pair
    level = ("none", "selective", "full").index(plan.activation_checkpointing)
    return complexity(plan), level, cost.total_bytes, plan.world_size


def _ranked(problem: Problem, costed: list[Costed]) -> list[Costed]:
    """Fastest first; within 2 % of the fastest left the simplest, least recomputing, fewest bytes, fewest ranks."""
    taken = [(problem.step_seconds(*pair), number, pair) for number, pair in enumerate(costed)]
    left = sorted(taken, key=lambda timed: timed[:2])
    ranked: list[Costed] = []
    while left and len(ranked) < (KEPT if len(costed) > 4 * KEPT else len(costed)):
        edge = left[0][0] * NEAR_TIE
        near = [timed for timed in left[: 4 * KEPT] if timed[0] <= edge]
        best = min(near, key=lambda timed: _simpler(timed[2]))
        ranked.append(best[2])
        left.remove(best)
    return ranked
