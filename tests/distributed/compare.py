"""A workspace to train in, and the measure of "the same" between two trainings of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from tasks.params import read_params
from tasks.paths import Paths
from tasks.trainer.base_model import ensure_base
from tests import tiny
from tests.distributed.ranks import Trained

ROWS = 26  # not a multiple of the global batch: the last step of an epoch is short, and a rank runs dry
CLIP = 0.5  # bites
CHANGES = {
    "train.global_batch": 8,
    "train.num_train_epochs": 2,
    "train.learning_rate": 0.01,
    "train.max_grad_norm": CLIP,
    "train.checkpoint_every_seconds": 0.0,
    "train.lora.rank": 4,
    "register.tracking_uri": "sqlite:////nonexistent/never.db",  # training goes on without MLflow
}


def workspace(root: Path, model: dict[str, Any] | None = None, **changes: object) -> Path:
    """Base (`model`: what is asked of `tiny.write_model`) and rows of very unequal lengths and target counts."""
    root.mkdir(parents=True)
    folder = tiny.write_model(root / "model", **(model or {}))
    tiny.write_params(root, **{**CHANGES, "model.name_or_path": str(folder), **changes})
    params = tiny.params(**{"model.name_or_path": str(folder)})
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


def weights(trained: Trained) -> dict[str, torch.Tensor]:
    folder = trained.run / "finished" / "final"
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def keep(trained: Trained, factory: pytest.TempPathFactory) -> Trained:
    """A copy that later trainings in the same workspace do not overwrite."""
    kept = factory.mktemp("kept") / "run"
    shutil.copytree(trained.run, kept)
    return Trained(kept, trained.records)


def start_weights(root: Path) -> dict[str, torch.Tensor]:
    """What training in a workspace starts from, by the names of the export: the base's weights, or the adapter's."""
    from peft import get_peft_model_state_dict

    from tasks.trainer.adapters import attach_adapters
    from tasks.trainer.loading import load_base

    params = read_params(root / "params.yaml")
    if params.train.finetuning_type == "full":
        return load_file(root / "model" / "model.safetensors")
    model = attach_adapters(load_base(Paths(root), torch.float32), params.train, params.seed)
    state = get_peft_model_state_dict(model, save_embedding_layers=params.train.lora.train_embeddings)
    return {name: value.clone() for name, value in state.items()}


def assert_same(
    one: Trained,
    other: Trained,
    start: dict[str, torch.Tensor],
    loss: float = 1e-5,
    moved: float = 1e-3,
    clip: float = CLIP,
) -> None:
    """Samples and rates equal, loss and gradient norm within `loss`, weights within `moved` of what they moved.

    A norm must have been above `clip`, at which the recipe clips.
    """
    assert max(record.grad_norm for record in one.records) > clip, "no step is clipped"
    assert [record.samples for record in one.records] == [record.samples for record in other.records]
    for left, right in zip(one.records, other.records, strict=True):
        assert abs(left.loss - right.loss) <= loss * abs(left.loss), left.step
        assert abs(left.grad_norm - right.grad_norm) <= loss * left.grad_norm, left.step
        assert left.learning_rate == right.learning_rate
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        distance = (value - start[name]).norm()
        assert distance > 0, name
        assert (value - second[name]).norm() <= moved * distance, name
