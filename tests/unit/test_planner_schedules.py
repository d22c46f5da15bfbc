"""Pipeline schedules as the planner knows them, against those of torch.distributed.pipelining."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from tasks.planner.legal import schedule_fits, stages_stay_busy
from tasks.planner.stages import idle, in_flight, last_rank, rank_layers
from tests.tiny import cpu_plan
from tests.unit.planner_cases import SMOL, cpu, problem

CLASSES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved1f1b": ScheduleInterleaved1F1B,
    "zerobubble": ScheduleZBVZeroBubble,
}
CHUNKS = {"gpipe": (1,), "1f1b": (1,), "interleaved1f1b": (2, 3), "zerobubble": (2, 3)}
CASES = [
    (name, ranks, chunks, count)
    for name, several in CHUNKS.items()
    for chunks in several
    for ranks in (2, 3, 4)
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 12)
]


def plan_of(name: str, ranks: int, chunks: int, count: int):
    return cpu_plan(pp=ranks, schedule=name, virtual_stages=chunks, micro_batch=1, accumulation=count)


def torch_schedule(name: str, ranks: int, chunks: int, count: int):
    """torch's schedule on its first rank, over stages that hold nothing.

    Raises:
        ValueError: torch refuses it.
    """
    total = ranks * chunks
    own = (0, total - 1) if name == "zerobubble" and chunks == 2 else range(0, total, ranks)
    stages = [
        SimpleNamespace(
            stage_index=index,
            group_rank=0,
            group_size=ranks,
            num_stages=total,
            is_first=index == 0,
            is_last=index == total - 1,
            submod=torch.nn.Identity(),
        )
        for index in own
    ]
    return CLASSES[name](stages if chunks > 1 else stages[0], count, lambda output, target: output)


@pytest.mark.parametrize(("name", "ranks", "chunks", "count"), CASES)
def test_torch_takes_what_is_legal_and_holds_and_idles_as_predicted(name, ranks, chunks, count):
    plan, ground = plan_of(name, ranks, chunks, count), problem(cpu(2), SMOL).ground
    broken = stages_stay_busy(plan, ground) or schedule_fits(plan, ground)
    try:
        schedule = torch_schedule(name, ranks, chunks, count)
    except ValueError:
        assert broken
        return
    assert broken is None
    if chunks == 1:  # such schedules have no written order
        return
    order = {
        rank: [action for action in row if action is not None]
        for rank, row in schedule.pipeline_order.items()
    }
    for rank, row in order.items():
        assert in_flight(plan, rank) == pytest.approx(most_held(row) / chunks), (rank, name)
    waited = longest(order, ranks * chunks) / (3 * chunks) - count
    if name == "interleaved1f1b":
        assert idle(plan) == pytest.approx(waited)
    else:  # at equal times for outputs, inputs and weights; where they differ a rank waits longer
        assert waited - 1e-9 <= idle(plan) <= 2 * waited + 1e-9
    assert last_rank(plan) == next(rank for rank, row in order.items() if row_has(row, ranks * chunks - 1))


def row_has(row, stage: int) -> bool:
    return any(action.stage_index == stage for action in row)


def most_held(row) -> int:
    """Chunk passes whose activations are there at once: from the forward pass to all of its backward pass."""
    held = most = 0
    for action in row:
        held += {"F": 1, "B": -1, "W": -1, "I": 0}[action.computation_type.value]
        most = max(most, held)
    return most


def longest(order, stages: int) -> float:
    """When the last rank ends, if a chunk's forward pass takes 1 and its backward pass 2, half of it for inputs."""
    done: dict[tuple[int, str, int], float] = {}
    clock = dict.fromkeys(order, 0.0)
    ahead = {rank: list(row) for rank, row in order.items()}
    while any(ahead.values()):
        for rank, row in ahead.items():
            while row:
                stage, kind, micro_batch = (
                    row[0].stage_index,
                    row[0].computation_type.value,
                    row[0].microbatch_index,
                )
                needed = {
                    "F": [(stage - 1, "F")] * (stage > 0),
                    "W": [(stage, "B")],
                }.get(kind, [(stage, "F"), *[(stage + 1, "B")] * (stage < stages - 1)])
                needed = [(*each, micro_batch) for each in needed]
                if any(each not in done for each in needed):
                    break
                took = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}[kind]
                clock[rank] = max([clock[rank], *(done[each] for each in needed)]) + took
                done[stage, "B" if kind == "I" else kind, micro_batch] = clock[rank]
                row.pop(0)
    return max(clock.values())


def test_chunks_of_a_rank_are_those_its_schedule_gives_it():
    layers = 30  # over 8 chunks: 3, 4, 4, 4, 4, 4, 4, 3
    assert SMOL.layers == layers
    in_turn = rank_layers(SMOL, plan_of("interleaved1f1b", 4, 2, 8), "even")
    forth_and_back = rank_layers(SMOL, plan_of("zerobubble", 4, 2, 8), "even")
    assert in_turn == (7, 8, 8, 7) and forth_and_back == (6, 8, 8, 8)
    assert rank_layers(SMOL, plan_of("1f1b", 4, 1, 8), "even") == (7, 8, 8, 7)
