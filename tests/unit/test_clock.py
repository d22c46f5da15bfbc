"""The clock of a step: what belongs to which kind, and that nothing is lost. Time here moves by `Hours.sleep` alone."""

from __future__ import annotations

import pytest
import torch

from tasks.trainer import clock as module_of_clock
from tasks.trainer.clock import KINDS, StepClock


class Hours:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch) -> Hours:
    made = Hours()
    monkeypatch.setattr(module_of_clock, "time", made)
    return made


class Slow(torch.nn.Module):
    """Its forward pass takes a second."""

    def __init__(self, hours: Hours) -> None:
        super().__init__()
        self.hours = hours

    def forward(self) -> torch.Tensor:
        self.hours.sleep(1)
        return torch.zeros(())


def test_forward_passes_mark_themselves_and_the_rest_is_told(hours: Hours) -> None:
    module = Slow(hours)
    clock = StepClock(module, False)
    for _ in range(2):
        clock.start()
        for _ in range(2):
            module()
            hours.sleep(2)  # backward
        clock.reduced()
        hours.sleep(4)
        clock.mark("communication")
        hours.sleep(8)
        clock.stop()
    totals = clock.totals
    assert {kind: totals[kind] for kind in KINDS} == {
        "forward": 4,
        "backward": 8,
        "communication": 8,
        "pipeline_wait": 0,
        "optimizer": 16,
    }
    assert totals["queued"] == 0
    assert sum(totals.values()) == hours.now - 100


def test_what_runs_between_steps_is_not_counted(hours: Hours) -> None:
    module = Slow(hours)
    clock = StepClock(module, False)
    module()
    clock.mark("backward")
    assert not any(clock.totals.values())
    clock.start()
    clock.reduced()
    clock.stop()
    module()
    assert not any(clock.totals.values())


class Stage:
    """What a pipeline's schedule calls."""

    def __init__(self, hours: Hours) -> None:
        self.module = Slow(hours)
        self.hours = hours

    def forward_one_chunk(self, chunk: int) -> torch.Tensor:
        return self.module()

    def backward_one_chunk(self, chunk: int, last_backward: bool = False) -> None:
        self.hours.sleep(2)

    def backward_weight_one_chunk(self, chunk: int) -> None:
        self.hours.sleep(4)


def test_between_the_passes_of_a_pipeline_a_stage_waits(hours: Hours) -> None:
    stage = Stage(hours)
    clock = StepClock([stage.module], False)
    clock.watch_stages([stage])
    clock.start()
    for chunk in range(2):
        hours.sleep(8)
        assert stage.forward_one_chunk(chunk).shape == ()
    for chunk in range(2):
        hours.sleep(16)
        stage.backward_one_chunk(chunk, last_backward=chunk == 1)
        stage.backward_weight_one_chunk(chunk)
    hours.sleep(32)
    clock.reduced()
    clock.stop()
    totals = clock.totals
    assert (totals["forward"], totals["backward"], totals["pipeline_wait"]) == (2, 12, 80)
    assert sum(totals.values()) == hours.now - 100
