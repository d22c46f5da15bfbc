"""Every way to split the work that is worth costing: axes, how data-parallel ranks share, pipeline schedules.

Left out is what another plan beats by construction: tensor parallelism without sequence parallelism where that is
legal (same traffic, more memory), gpipe where 1f1b is legal (same bubble, more memory), plans that start processes
side by side on one CPU, offload to disk while something else fits. A pin brings any of them back, as does `nvme`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tasks.contracts import Plan
from tasks.planner.ground import divisors
from tasks.planner.legal import (
    LAYOUT,
    PIPELINE,
    STEP,
    TENSOR,
    Broken,
    broken,
    sequence_parallel,
    stages_have_layers,
    tp_divides,
)
from tasks.planner.pinned import check_pins, data_parallel_degrees
from tasks.planner.problem import Problem, Schedule

MANY_RANKS = 16
CHUNKS = (2, 4)


class Sharing(NamedTuple):
    """How data-parallel ranks share: one choice of the plan's fields."""

    engine: str
    sharding: str
    dp_replicate: int
    dp_shard: int
    offload: str = "none"
    offload_parameters: str = "none"
    replication: str = "ddp"


class RuledOut(dict[tuple[str, int, int], tuple[Plan, str]]):
    """Plans that broke a rule, with the sentence: one a rule, tensor and pipeline degree where these are at fault."""

    def note(self, plan: Plan, fault: Broken) -> None:
        axes = fault.rule.startswith(("tp_", "sequence_")), fault.rule.startswith("stages_")
        self.setdefault((fault.rule, plan.tp * axes[0], plan.pp * axes[1]), (plan, fault.sentence))


def layouts(problem: Problem, ruled_out: RuledOut, nvme: bool = False) -> Iterator[Plan]:
    """Legal plans with micro-batch 1, and neither recomputing nor compiling unless pinned; the illegal are noted in
    `ruled_out`.

    Raises:
        UserError: a pin breaks a rule or cannot be trained.
    """
    check_pins(problem)
    ground, pins = problem.ground, problem.pins
    for tp in _tensor(problem):
        for pp in _pipeline(problem, tp):
            axes = _plan(problem, 1, tp, pp)
            if fault := broken(axes, ground, (tp_divides, stages_have_layers)):
                ruled_out.note(axes, fault)
                continue
            for dp in data_parallel_degrees(problem, tp * pp):
                for sharing in _sharings(problem, dp, tp, nvme):
                    for schedule, chunks in _schedules(problem, pp, problem.batch // dp):
                        plan = _plan(problem, dp, tp, pp, sharing, schedule, chunks)
                        if fault := broken(plan, ground, (sequence_parallel,)):
                            ruled_out.note(plan, fault)
                            plan = plan.model_copy(update={"sequence_parallel": False})
                        if not pins.allow(plan):
                            continue
                        if fault := broken(plan, ground, TENSOR + PIPELINE + LAYOUT):
                            ruled_out.note(plan, fault)
                            continue
                        yield plan


def micro_batches(problem: Problem, layout: Plan) -> Iterator[Plan]:
    """The layout with every micro-batch that keeps the global batch and its schedule's rule, ascending."""
    share, pins = problem.batch // layout.data_parallel, problem.pins
    for micro in divisors(share):
        count = share // micro
        if pins.micro_batch in (None, micro) and pins.accumulation in (None, count):
            plan = layout.model_copy(update={"micro_batch": micro, "accumulation": count})
            if layout.pp == 1 or not broken(plan, problem.ground, STEP):
                yield plan


def levels(problem: Problem, layout: Plan) -> tuple[str, ...]:
    """Activation checkpointing to try, the quickest first. Zero-bubble goes without."""
    pinned = problem.pins.activation_checkpointing
    if layout.schedule == "zerobubble":
        return ("none",)
    able = problem.capabilities.levels
    if layout.replication == "data_parallel":
        able = tuple(level for level in able if level != "selective")
    return able if pinned is None else (pinned,)


def complexity(plan: Plan) -> int:
    """How much machinery a plan needs beside plain processes; breaks near ties."""
    shared = {"none": 0, "fsdp2": 1, "zero0": 2, "zero1": 2, "zero2": 2, "zero3": 3}[plan.sharding]
    piped = {"none": 0, "gpipe": 3, "1f1b": 3, "interleaved1f1b": 4, "zerobubble": 5}[plan.schedule]
    offloaded = (plan.offload != "none") + (plan.offload_parameters != "none")
    mixed = plan.dp_replicate > 1 and shared > 0
    return shared + piped + 2 * (plan.tp > 1) + 3 * offloaded + mixed + plan.compiled


# --- axes ---------------------------------------------------------------------------------------


def _powers(most: int) -> set[int]:
    return {2**power for power in range(most.bit_length()) if 2**power <= most}


def _tensor(problem: Problem) -> list[int]:
    if problem.pins.tp is not None:
        return [problem.pins.tp]
    can = problem.capabilities
    if not (can.tensor and can.splits(problem.spec)) or problem.hardware.device == "cpu":
        return [1]
    most = min(problem.ground.a_node, problem.most_ranks)
    return sorted(set(divisors(most)) | _powers(most))


def _pipeline(problem: Problem, tp: int) -> list[int]:
    if problem.pins.pp is not None:
        return [problem.pins.pp]
    can = problem.capabilities
    if not (can.pipeline and can.splits(problem.spec)) or problem.hardware.device == "cpu":
        return [1]
    most = max(1, problem.most_ranks // tp)
    return sorted(pp for pp in set(divisors(most)) | _powers(most) if pp <= 2 * problem.spec.layers)


def _sharings(problem: Problem, dp: int, tp: int, nvme: bool) -> list[Sharing]:
    """DDP, FSDP2 over all ranks or over those of a node, ZeRO with and without offload."""
    can, pins = problem.capabilities.shardings, problem.pins
    found = [Sharing("torch", "none", dp, 1)]
    if pins.replication == "data_parallel":
        # On one of several GPUs it is no way of sharing; on a single one it is named as what stands against the pin.
        return [found[0]._replace(replication="data_parallel")] if dp > 1 or problem.most_ranks == 1 else []
    if "fsdp2" in can:
        within = max(1, problem.ground.a_node // tp)
        shards = [shard for shard in divisors(dp) if shard > 1]
        if dp > MANY_RANKS:
            shards = [shard for shard in shards if shard in (dp, within)]
        found += [Sharing("torch", "fsdp2", dp // shard, shard) for shard in shards]
    return found + _zero(problem, dp, nvme)


def _zero(problem: Problem, dp: int, nvme: bool) -> list[Sharing]:
    """DeepSpeed's ways. On a CPU, and without sharing anything (zero0), only where a pin asks for them."""
    can, pins, cuda = problem.capabilities, problem.pins, problem.hardware.device == "cuda"
    away = {where for where in (pins.offload, pins.offload_parameters) if where not in (None, "none")}
    pinned = pins.engine == "deepspeed" or (pins.sharding or "").startswith("zero") or bool(away)
    if "zero2" not in can.shardings or not (cuda or pinned):
        return []
    stages = ["zero0"] if pins.sharding == "zero0" else []
    stages += ["zero1", "zero2", "zero3"] if dp > 1 or pinned else []
    found = [Sharing("deepspeed", zero, 1, dp) for zero in stages if zero in can.shardings]
    if not can.offload:
        return found
    # On a CPU all is in host memory as it is.
    for where in sorted(away | ({"cpu"} if cuda else set()) | ({"nvme"} if nvme else set())):
        with_offload = ("zero3",) if where == "nvme" else ("zero2", "zero3")
        found += [Sharing("deepspeed", zero, 1, dp, where) for zero in with_offload]
        found += [Sharing("deepspeed", "zero3", 1, dp, where, weights) for weights in sorted(away | {where})]
    return found


def _schedules(problem: Problem, pp: int, share: int) -> list[tuple[Schedule, int]]:
    """Schedules and model chunks a rank; `share` samples a rank is the most micro-batches there can be."""
    if pp == 1:
        return [("none", 1)]
    layers, pinned = problem.spec.layers, problem.pins.schedule
    found: list[tuple[Schedule, int]] = [("1f1b", 1)] if share >= pp else [("gpipe", 1)]
    found += [("interleaved1f1b", chunks) for chunks in CHUNKS if chunks * pp <= layers]
    whole = problem.pins.activation_checkpointing in (None, "none") and not problem.pins.compiled
    if problem.work.method == "full" and 2 * pp <= layers and whole:
        found.append(("zerobubble", 2))
    if pinned is not None and pinned not in dict(found):
        found.append((pinned, 2 if pinned in ("interleaved1f1b", "zerobubble") else 1))
    return found


def _plan(
    problem: Problem,
    dp: int,
    tp: int,
    pp: int,
    sharing: Sharing | None = None,
    schedule: Schedule = "none",
    chunks: int = 1,
) -> Plan:
    part = sharing or Sharing("torch", "none", dp, 1)
    return Plan.model_construct(
        device=problem.hardware.device,
        backend=problem.backend,
        tp=tp,
        pp=pp,
        schedule=schedule,
        virtual_stages=chunks,
        micro_batch=1,
        accumulation=max(1, problem.batch // dp),
        activation_checkpointing=problem.pins.activation_checkpointing or "none",
        sequence_parallel=tp > 1 and problem.pins.sequence_parallel is not False,
        compiled=problem.pins.compiled is True,
        **part._asdict(),
    )
