"""A converted model trains as any other: LoRA learns, and a model that is cut takes the same steps as a whole one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.params import read_params
from tasks.paths import Paths
from tasks.trainer.base_model import ensure_base
from tasks.trainer.run_state import StepRecord
from tests import tiny
from tests.distributed.compare import CHANGES, weights, workspace
from tests.distributed.ranks import Trained, train
from tests.unit import legacy_cases

pytestmark = pytest.mark.distributed


def recipe(kind: str, root: Path) -> Path:
    """The usual rows on a published folder; an epoch of 26 rows is three full steps and a short one."""
    workspace(root)
    folder = legacy_cases.write(root / "published", kind)
    changes = {
        "model.name_or_path": str(folder),
        "train.finetuning_type": "lora",
        "train.num_train_epochs": 3,
    }
    tiny.write_params(root, **{**CHANGES, **changes})
    ensure_base(read_params(root / "params.yaml").model, Paths(root))
    return root


def learnt(epoch: list[StepRecord]) -> float:
    return sum(step.loss * step.target_tokens for step in epoch) / sum(step.target_tokens for step in epoch)


def moved(trained: Trained) -> bool:
    """Every adapter's second factor begins at zero."""
    return all(value.abs().max() > 0 for name, value in weights(trained).items() if "lora_B" in name)


CUTS = {
    "qwen": tiny.cpu_plan(1, 2, 4, tp=2),
    "baichuan2": tiny.cpu_plan(1, 2, 4, pp=2, schedule="1f1b"),
    "chatglm3": tiny.cpu_plan(1, 2, 4, tp=2, sequence_parallel=True),
}


@pytest.mark.parametrize("kind", CUTS)
def test_lora_trains_on_a_converted_model(kind: str, tmp_path: Path) -> None:
    root = recipe(kind, tmp_path / "w")
    one = train(root, tiny.params(), tiny.cpu_plan(1, 2, 4))
    assert len(one.records) == 12 and moved(one)
    first, last = one.records[:4], one.records[-4:]
    assert learnt(last) < learnt(first), "the same rows, two epochs later"
    cut = train(root, tiny.params(), CUTS[kind], run_key="cut")
    for left, right in zip(one.records, cut.records, strict=True):
        assert abs(left.loss - right.loss) <= 1e-5 * left.loss
