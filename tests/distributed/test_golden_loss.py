"""What a recipe computes, pinned as numbers: equal results between plans cannot show that all changed alike.

Weights and rows come from numpy's RandomState, whose stream is frozen for good. The adapter's first weights do
not: they are drawn by PEFT, and a release that draws others trains another model too.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.data.order import SampleOrder
from tasks.paths import Paths
from tasks.run_key import NUMERICS_VERSION
from tasks.trainer.base_model import ensure_base
from tests import tiny
from tests.distributed.ranks import train

pytestmark = pytest.mark.distributed

ROWS = 11  # two steps of four and a short one an epoch
RECIPE = {
    "seed": 42,
    "train.global_batch": 4,
    "train.num_train_epochs": 2,
    "train.learning_rate": 0.01,
    "train.lr_scheduler_type": "cosine",
    "train.warmup_ratio": 0.34,
    "train.weight_decay": 0.1,
    "train.max_grad_norm": 0.5,  # bites
    "train.lora.rank": 4,
    "train.lora.alpha": 32,
    "train.checkpoint_every_seconds": 600,
    "register.tracking_uri": "sqlite:////nonexistent/never.db",
}
PINNED_AT = 1
LOSSES = {
    "lora": [5.9798796, 5.9144534, 6.2018595, 4.9283904, 5.0830891, 5.1196092],
    "full": [5.9798796, 5.8793760, 6.1657371, 4.4337323, 4.5171414, 4.4190589],
}
WAY_OUT = (
    "another loss for the same recipe: if that is meant, raise NUMERICS_VERSION in tasks/run_key.py, so that no run "
    "goes on with other arithmetic, and pin the new losses here with it; if not, something changed that should not"
)


def workspace(root: Path, method: str) -> Path:
    """Base and rows that no library's random numbers touch, ready to train."""
    draw = np.random.RandomState(7)
    root.mkdir()
    model = tiny.write_model(root / "model")
    weights = load_file(model / "model.safetensors")
    for name in sorted(weights):
        if not name.endswith("norm.weight"):
            weights[name] = torch.from_numpy(draw.uniform(-0.3, 0.3, weights[name].shape).astype(np.float32))
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    changes = {**RECIPE, "model.name_or_path": str(model), "train.finetuning_type": method}
    tiny.write_params(root, **changes)
    ensure_base(tiny.params(**changes).model, Paths(root))
    ids = [draw.randint(3, 259, 5 + 7 * row % 23).tolist() for row in range(ROWS)]
    labels = [[-100] * (2 + row % 3) + row_ids[2 + row % 3 :] for row, row_ids in enumerate(ids)]
    table = pa.table(
        {"input_ids": pa.array(ids, pa.list_(pa.int32())), "labels": pa.array(labels, pa.list_(pa.int32()))}
    )
    prepared = Paths(root).prepared
    prepared.mkdir(parents=True)
    with pa.ipc.new_file(prepared / "train.arrow", table.schema) as writer:
        writer.write_table(table)
    tiny.cpu_hardware().write(Paths(root).hardware)
    return root


@pytest.mark.parametrize("method", list(LOSSES))
def test_losses_are_golden(tmp_path: Path, method: str) -> None:
    """A change that is meant raises NUMERICS_VERSION and pins these numbers anew."""
    trained = train(workspace(tmp_path / "w", method), tiny.params(), tiny.cpu_plan(1, 2, 2))
    order = SampleOrder(ROWS, 4, 42)
    assert [list(record.samples) for record in trained.records] == [
        order.samples(step).tolist() for step in range(6)
    ]
    losses = [record.loss for record in trained.records]
    assert losses == pytest.approx(LOSSES[method], rel=1e-5, abs=0), WAY_OUT
    assert NUMERICS_VERSION == PINNED_AT, (
        "NUMERICS_VERSION was raised, yet these losses are the old ones: change the recipe here so that they show "
        "what changed (or leave them if it cannot), then set PINNED_AT"
    )
