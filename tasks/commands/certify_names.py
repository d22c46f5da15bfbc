"""Names of plans on certify's command line, and the plan that a name means for one recipe on one machine."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Literal, cast

from tasks.contracts import Plan, Precision
from tasks.errors import UserError
from tasks.planner.ground import Ground
from tasks.planner.legal import RULES, broken, world_is_there
from tasks.planner.problem import Problem

MOST_MICRO_BATCH = 4
# What a process with torch and transformers takes before it holds a model.
PROCESS_BYTES = 2**29
GRAMMAR = (
    "single, ddp2, fsdp2, tp2, tp2sp (sequence parallel), pp2 (1f1b; also pp2-gpipe, pp2-interleaved, pp2-zerobubble), "
    "products of them such as dp2tp2, fsdp2pp2, dp2tp2pp2 or dp2fsdp2, zero0 to zero3 (of two ranks; zero2dp4 of "
    "four), zero2+cpu, zero3+cpu, zero3+nvme, dataparallel (one process, two GPUs); a number is a degree"
)
PART = re.compile(r"(ddp|dp|fsdp|tp|pp)(\d+)(sp|v\d+)?")
SCHEDULE = re.compile(r"-(gpipe|1f1b|interleaved|interleaved1f1b|zerobubble)$")
DEEPSPEED = re.compile(r"(zero[0-3])(?:dp(\d+))?(?:\+(cpu|nvme))?")
OFFLOADING = {None: ("zero0", "zero1", "zero2", "zero3"), "cpu": ("zero2", "zero3"), "nvme": ("zero3",)}
AXES = {"ddp": "replicas", "dp": "replicas", "fsdp": "shards", "tp": "tp", "pp": "pp"}
CHUNKED = ("interleaved1f1b", "zerobubble")

Zero = Literal["zero0", "zero1", "zero2", "zero3"]
Offload = Literal["none", "cpu", "nvme"]
Schedule = Literal["none", "gpipe", "1f1b", "interleaved1f1b", "zerobubble"]


@dataclass(frozen=True)
class Wanted:
    """A name's meaning, whatever the recipe. `missing` says why no engine here can run it."""

    name: str
    replicas: int = 1
    shards: int = 1
    tp: int = 1
    pp: int = 1
    sharded: bool = False
    zero: Zero | None = None
    offload: Offload = "none"
    sequence_parallel: bool = False
    schedule: Schedule = "none"
    chunks: int = 1
    replication: Literal["ddp", "data_parallel"] = "ddp"
    missing: str | None = None


@dataclass(frozen=True)
class NotRun:
    """Why a plan was not run; `started` if its workers were, and failed."""

    reason: str
    started: bool = False


def parse_name(name: str) -> Wanted:
    """tp2pp2, dp2tp2sp-gpipe, fsdp2 and so on; parts in any order, `x` or `-` between them if liked.

    Raises:
        UserError: it names no plan.
    """
    said = name.strip().lower()
    if said == "single":
        return Wanted(said)
    if zero := DEEPSPEED.fullmatch(said):
        if zero.group(1) not in OFFLOADING[zero.group(3)] or not int(zero.group(2) or 2):
            raise _no_plan(name)
        return _with_zero(said, zero.group(1), int(zero.group(2) or 2), zero.group(3) or "none")
    if one_process := re.fullmatch(r"dataparallel(\d*)", said):
        return Wanted(said, replicas=int(one_process.group(1) or 2), replication="data_parallel")
    found = SCHEDULE.search(said)
    body = re.sub(r"(?<=[\dvp])[x×*_-](?=[dftp])", "", said[: found.start()] if found else said)
    if not re.fullmatch(f"(?:{PART.pattern})+", body):
        raise _no_plan(name)
    wanted = Wanted(said)
    seen = set()
    for axis, degree, more in (match.groups() for match in PART.finditer(body)):
        field = AXES[axis]
        if field in seen or int(degree) == 0:
            raise _no_plan(name)
        seen.add(field)
        wanted = replace(wanted, **{field: int(degree)}, sharded=wanted.sharded or axis == "fsdp")
        if more:
            wanted = _with_suffix(wanted, axis, more, name)
    return _with_schedule(wanted, found.group(1) if found else None, name)


def _with_zero(said: str, stage: str, degree: int, offload: str) -> Wanted:
    missing = None if find_spec("deepspeed") else "DeepSpeed is not installed; pip install deepspeed"
    # The name was matched: it has no other words.
    return Wanted(
        said, shards=degree, zero=cast(Zero, stage), offload=cast(Offload, offload), missing=missing
    )


def _no_plan(name: str) -> UserError:
    return UserError(f"--plans names {name!r}, which is no plan; use {GRAMMAR}")


def _with_suffix(wanted: Wanted, axis: str, more: str, name: str) -> Wanted:
    if axis == "tp" and more == "sp":
        return replace(wanted, sequence_parallel=True)
    if axis == "pp" and more != "sp" and int(more[1:]) > 0:
        return replace(wanted, chunks=int(more[1:]))
    raise _no_plan(name)


def _with_schedule(wanted: Wanted, said: str | None, name: str) -> Wanted:
    if wanted.pp == 1:
        if said or wanted.chunks > 1:
            raise _no_plan(name)
        return wanted
    words: dict[str | None, Schedule] = {
        None: "interleaved1f1b" if wanted.chunks > 1 else "1f1b",
        "gpipe": "gpipe",
        "1f1b": "1f1b",
        "interleaved": "interleaved1f1b",
        "interleaved1f1b": "interleaved1f1b",
        "zerobubble": "zerobubble",
    }
    schedule = words[said]
    chunks = 2 if schedule in CHUNKED and wanted.chunks == 1 else wanted.chunks
    return replace(wanted, schedule=schedule, chunks=chunks)


def plan_for(wanted: Wanted, problem: Problem, precision: Precision) -> Plan | NotRun:
    """The plan for this recipe and machine, in micro-batches that its memory holds, or why there is none.

    Several micro-batches a step are taken wherever a rank's share allows, since summing over them is part of the
    proof. Where nothing fits by prediction the smallest is tried all the same.
    """
    if wanted.missing:
        return NotRun(wanted.missing)
    plans = _candidates(wanted, problem)
    ground = _ground(problem, plans[0])
    rules = (world_is_there, *RULES)
    legal = [plan for plan in plans if broken(plan, ground, rules) is None]
    if not legal:
        simplest = [plan for plan in plans if plan.activation_checkpointing == "none"][-1]
        wrong = broken(simplest, ground, rules)
        assert wrong is not None
        return NotRun(wrong.sentence)
    if not problem.capabilities.can(legal[0], problem.spec, problem.work, ground.a_node):
        return NotRun(f"{wanted.name} is planned by `elastane plan` but not yet trained by this version")
    wider = 2 if precision == "float64" else 1  # the planner knows no float64
    for plan in legal:
        cost = problem.cost.estimate(plan)
        if wider * cost.peak_bytes <= cost.memory_limit_bytes:
            return plan
    return legal[-1]


def _ground(problem: Problem, plan: Plan) -> Ground:
    """One node; on a CPU any number of processes that its memory holds, beside each other or not."""
    if problem.hardware.device == "cuda":
        return replace(problem.ground, tp_pinned=True)
    ranks = max(2, problem.hardware.host_memory_bytes // PROCESS_BYTES)
    return replace(problem.ground, ranks=ranks, a_node=ranks, tp_pinned=True)


def _candidates(wanted: Wanted, problem: Problem) -> list[Plan]:
    """Without recomputing first, then with; the largest micro-batch first. Never empty."""
    share = problem.batch // (wanted.replicas * wanted.shards)
    sizes = [
        size
        for size in range(min(MOST_MICRO_BATCH, max(1, share // 2)), 0, -1)
        if share and share % size == 0
    ]
    levels: tuple[Literal["none", "full"], ...] = ("none", "full")
    return [
        Plan(
            engine="deepspeed" if wanted.zero else "torch",
            device=problem.hardware.device,
            backend=problem.backend,
            dp_replicate=wanted.replicas,
            dp_shard=wanted.shards,
            tp=wanted.tp,
            pp=wanted.pp,
            schedule=wanted.schedule,
            micro_batch=size,
            accumulation=max(1, share // size),
            activation_checkpointing=level,
            offload=wanted.offload,
            sharding=wanted.zero or ("fsdp2" if wanted.sharded else "none"),
            sequence_parallel=wanted.sequence_parallel,
            virtual_stages=wanted.chunks,
            replication=wanted.replication,
        )
        for level in levels
        for size in sizes or [1]
    ]
