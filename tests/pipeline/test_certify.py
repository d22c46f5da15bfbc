"""`elastane certify` on a real workspace: equal plans pass, and a run that learnt otherwise is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tasks.commands.certify import Run, compare, plan_named
from tasks.errors import UserError
from tasks.trainer.run_state import StepRecord
from tests.pipeline.workspace import Workspace
from tests.unit.planner_cases import cpu, gpus

pytestmark = [pytest.mark.timeout(300), pytest.mark.distributed]


def test_plans_of_a_workspace_learn_the_same(finished: Workspace, tmp_path: Path) -> None:
    workspace = finished.copy(tmp_path / "w")
    done = workspace.must("elastane", "certify", "--plans", "single,ddp2,fsdp2", "--steps", "3", "--json")
    said = json.loads(done.stdout)
    assert said["same"] is True
    assert [each["plan"] for each in said["plans"]] == ["single", "ddp2", "fsdp2"]
    for each in said["plans"]:
        assert each["steps"] >= 2
        assert each["loss"] <= 1e-5 and each["grad_norm"] <= 1e-5 and each["weights"] <= 1e-3
    assert (
        said["plans"][1]["weights"] > 0
    )  # two ranks sum in another order: equal to the bit would be the same run
    assert not list(workspace.root.glob("runs/certify*"))


def record(loss: float) -> StepRecord:
    return StepRecord(
        step=1,
        loss=loss,
        grad_norm=1.0,
        learning_rate=0.1,
        tokens=4,
        target_tokens=4,
        seconds=1.0,
        samples=(0, 1),
    )


def test_a_plan_that_learns_otherwise_is_not_the_same() -> None:
    before = {"w": torch.zeros(3), "idle": torch.ones(2)}
    reference = Run([record(2.0)], {"w": torch.tensor([1.0, 2.0, 2.0]), "idle": torch.ones(2)})
    near = Run([record(2.0 + 1e-6)], {"w": torch.tensor([1.0, 2.0, 2.0003]), "idle": torch.ones(2)})
    far = Run([record(2.0)], {"w": torch.tensor([1.0, 2.0, 2.3]), "idle": torch.ones(2)})
    good, bad = compare("ddp2", reference, near, before, True), compare("ddp2", reference, far, before, True)
    assert good.same and good.unmoved == ("idle",)
    assert good.weights == pytest.approx(1e-4, rel=0.01)
    assert not bad.same and bad.worst_tensor == "w"
    assert not compare("ddp2", reference, Run([record(2.1)], near.weights), before, True).same


def test_names_of_plans() -> None:
    plan = plan_named("dp2fsdp2", 16, cpu(4))
    assert (plan.dp_replicate, plan.dp_shard, plan.sharding, plan.global_batch) == (2, 2, "fsdp2", 16)
    assert plan_named("ddp4", 16, cpu(4)).name == "ddp4"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("tp2", "is no plan that can be trained"),
        ("ddp3", "do not divide train.global_batch=16"),
        ("ddp4", "needs 4 GPUs, and 2 are visible"),
    ],
)
def test_wrong_plans_are_one_sentence(name: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        plan_named(name, 16, gpus(2))
