"""A plan decides only how fast: equal losses, norms and weights under every plan, and after every stop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tasks.contracts import BaseModelRef
from tasks.paths import Paths
from tasks.trainer.run_state import StepRecord
from tests import tiny
from tests.distributed.compare import ROWS, assert_same, start_weights, weights
from tests.distributed.ranks import Trained, train

pytestmark = pytest.mark.distributed


def test_lora_ddp2_equals_single(lora: Path, lora_single: Trained) -> None:
    other = train(lora, tiny.params(), tiny.cpu_plan(2, 2, 2))
    assert_same(lora_single, other, start_weights(lora))


def test_full_ddp2_with_other_micro_batch_and_checkpointing_equals_single(
    full: Path, full_single: Trained
) -> None:
    other = train(full, tiny.params(), tiny.cpu_plan(2, 4, 1, "full"))
    assert_same(full_single, other, start_weights(full))


def test_the_loss_is_learnt(full_single: Trained) -> None:
    """The second epoch's mean loss, over the same rows, is below the first's."""

    def mean(records: list[StepRecord]) -> float:
        return sum(r.loss * r.target_tokens for r in records) / sum(r.target_tokens for r in records)

    assert mean(full_single.records[4:]) < mean(full_single.records[:4]) - 0.05


@pytest.mark.parametrize("degree", [1, 2])
def test_resume_is_bit_for_bit(lora: Path, degree: int) -> None:
    """SIGTERM after three steps, then on: weights equal an uninterrupted run's exactly."""
    plan = tiny.cpu_plan(degree, 2, 4 // degree)
    whole = train(lora, tiny.params(), plan)
    expected = weights(whole)
    stopped = train(lora, tiny.params(), plan, stop_at=3)
    assert 3 <= len(stopped.records) < len(whole.records)
    resumed = train(lora, tiny.params(), plan, fresh=False)
    assert [record.loss for record in resumed.records] == [record.loss for record in whole.records]
    for name, value in weights(resumed).items():
        assert torch.equal(value, expected[name]), name


def test_resume_under_another_plan_goes_on_with_the_same_curve(full: Path, full_single: Trained) -> None:
    train(full, tiny.params(), tiny.cpu_plan(1, 2, 4), stop_at=3)
    assert_same(
        full_single, train(full, tiny.params(), tiny.cpu_plan(2, 2, 2), fresh=False), start_weights(full)
    )


def test_bfloat16_is_close_to_float32(lora: Path, lora_single: Trained) -> None:
    """Bfloat16 keeps 8 bits: losses within 2 % of float32's."""
    low = train(lora, tiny.params(), tiny.cpu_plan(1, 2, 4), precision="bfloat16")
    for left, right in zip(lora_single.records, low.records, strict=True):
        assert abs(left.loss - right.loss) <= 0.02 * left.loss


def test_reports_account_for_every_sample(lora_single: Trained) -> None:
    report = lora_single.report
    assert report.samples_seen == 2 * ROWS
    assert sorted(sample for record in lora_single.records[:4] for sample in record.samples) == list(
        range(ROWS)
    )


def test_base_ref_is_read_back(lora: Path) -> None:
    assert BaseModelRef.read(Paths(lora).base_ref).kind == "folder"
