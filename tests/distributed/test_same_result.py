"""A plan decides only how fast: equal losses, norms and weights under every plan, and after every stop."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from tasks.contracts import BaseModelRef
from tasks.paths import Paths
from tasks.trainer.base_model import ensure_base
from tasks.trainer.run_state import StepRecord
from tests import tiny
from tests.distributed.ranks import Trained, train

pytestmark = pytest.mark.distributed

ROWS = 26  # not a multiple of the global batch: the last step of an epoch is short, and a rank runs dry
CHANGES = {
    "train.global_batch": 8,
    "train.num_train_epochs": 2,
    "train.learning_rate": 0.01,
    "train.max_grad_norm": 0.5,  # bites
    "train.checkpoint_every_seconds": 0.0,
    "train.lora.rank": 4,
    "register.tracking_uri": "sqlite:////nonexistent/never.db",  # training goes on without MLflow
}


def _workspace(root: Path, **changes: object) -> Path:
    """Base and prepared rows of very unequal lengths and target counts."""
    root.mkdir(parents=True)
    model = tiny.write_model(root / "model")
    tiny.write_params(root, **{**CHANGES, "model.name_or_path": str(model), **changes})
    params = tiny.params(**{"model.name_or_path": str(model)})
    ensure_base(params.model, Paths(root))
    generator = torch.Generator().manual_seed(1)
    ids, labels = [], []
    for row in range(ROWS):
        length = 6 + (row * 7) % 40
        tokens = torch.randint(3, 259, (length,), generator=generator).tolist()
        learnt = 1 + (row * 5) % (length - 1)
        ids.append(tokens)
        labels.append([-100] * (length - learnt) + tokens[length - learnt :])
    table = pa.table(
        {
            "input_ids": pa.array(ids, pa.list_(pa.int32())),
            "labels": pa.array(labels, pa.list_(pa.int32())),
            "id": [f"{row:04x}" for row in range(ROWS)],
            "prompt": ["[]"] * ROWS,
            "reference": [""] * ROWS,
        }
    )
    prepared = root / "data" / "prepared"
    prepared.mkdir(parents=True)
    with pa.ipc.new_file(prepared / "train.arrow", table.schema) as writer:
        writer.write_table(table)
    tiny.cpu_hardware().write(root / "reports" / "hardware.json")
    return root


def _weights(trained: Trained) -> dict[str, torch.Tensor]:
    folder = trained.run / "finished" / "final"
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _workspace(tmp_path_factory.mktemp("lora") / "w")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _workspace(
        tmp_path_factory.mktemp("full") / "w",
        **{"train.finetuning_type": "full", "train.learning_rate": 0.003},
    )


@pytest.fixture(scope="module")
def lora_single(lora: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return _keep(train(lora, tiny.params(), tiny.cpu_plan(1, 2, 4)), tmp_path_factory)


@pytest.fixture(scope="module")
def full_single(full: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return _keep(train(full, tiny.params(), tiny.cpu_plan(1, 2, 4)), tmp_path_factory)


def _keep(trained: Trained, factory: pytest.TempPathFactory) -> Trained:
    """A copy that later trainings in the same workspace do not overwrite."""
    kept = factory.mktemp("kept") / "run"
    shutil.copytree(trained.run, kept)
    return Trained(kept, trained.records)


def _base_weights(root: Path) -> dict[str, torch.Tensor]:
    return load_file(root / "model" / "model.safetensors")


def _assert_same(one: Trained, other: Trained, start: dict[str, torch.Tensor] | None = None) -> None:
    assert [record.samples for record in one.records] == [record.samples for record in other.records]
    for left, right in zip(one.records, other.records, strict=True):
        assert abs(left.loss - right.loss) <= 1e-5 * abs(left.loss), left.step
        assert abs(left.grad_norm - right.grad_norm) <= 1e-5 * left.grad_norm, left.step
        assert left.learning_rate == right.learning_rate
    first, second = _weights(one), _weights(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        # An adapter's B starts at zero, so its norm is the distance moved; A moves little, so this is lenient there.
        moved = (value - start[name]).norm() if start else value.norm()
        assert (value - second[name]).norm() <= 1e-3 * moved, name


def test_lora_ddp2_equals_single(lora: Path, lora_single: Trained) -> None:
    _assert_same(lora_single, train(lora, tiny.params(), tiny.cpu_plan(2, 2, 2)))


def test_full_ddp2_with_other_micro_batch_and_checkpointing_equals_single(
    full: Path, full_single: Trained
) -> None:
    other = train(full, tiny.params(), tiny.cpu_plan(2, 4, 1, "full"))
    _assert_same(full_single, other, _base_weights(full))


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
    expected = _weights(whole)
    stopped = train(lora, tiny.params(), plan, stop_at=3)
    assert 3 <= len(stopped.records) < len(whole.records)
    resumed = train(lora, tiny.params(), plan, fresh=False)
    assert [record.loss for record in resumed.records] == [record.loss for record in whole.records]
    for name, value in _weights(resumed).items():
        assert torch.equal(value, expected[name]), name


def test_resume_under_another_plan_goes_on_with_the_same_curve(full: Path, full_single: Trained) -> None:
    train(full, tiny.params(), tiny.cpu_plan(1, 2, 4), stop_at=3)
    _assert_same(
        full_single, train(full, tiny.params(), tiny.cpu_plan(2, 2, 2), fresh=False), _base_weights(full)
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
