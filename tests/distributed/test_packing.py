"""Packed rows train what the same documents train alone, under every plan; and what reads across them is seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.contracts import Resolved
from tasks.data.packing import PackedSplit, training_rows, write_packs
from tasks.data.prepared import Split
from tasks.trainer.isolation import documents_of
from tasks.trainer.run_state import StepLog
from tasks.trainer.worker import WorkerOrder
from tests import tiny
from tests.distributed.compare import CLIP, ROWS, assert_same, keep, start_weights, workspace
from tests.distributed.ranks import Trained, _train_rank, run_ranks, train

pytestmark = pytest.mark.distributed

MAX_LENGTH = 64
SINGLE = tiny.cpu_plan(1, 2, 2)
PLANS = {
    "ddp2": tiny.cpu_plan(2, 1, 2),
    "fsdp2": tiny.cpu_plan(1, 1, 2, "full", shards=2),
    "tp2": tiny.cpu_plan(1, 2, 2, tp=2),
    "pp2": tiny.cpu_plan(1, 1, 4, pp=2, schedule="1f1b"),
    "pp2v2": tiny.cpu_plan(1, 1, 4, pp=2, schedule="interleaved1f1b", virtual_stages=2),
    "pp2v2-zerobubble": tiny.cpu_plan(1, 1, 4, pp=2, schedule="zerobubble", virtual_stages=2),
    "tp2pp2": tiny.cpu_plan(1, 2, 2, "selective", tp=2, sequence_parallel=True, pp=2, schedule="gpipe"),
}
# Of Mistral a token sees five; BLOOM is told no positions.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "layers": 4},
    "mistral": {"family": "mistral", "layers": 4},
    "qwen2": {"family": "qwen2", "layers": 4, "tied": True},
    "bloom": {"family": "bloom", "layers": 4, "tied": True},
}
QUICK = {("llama", "fsdp2"), ("llama", "tp2pp2"), ("bloom", "pp2")}
# transformers' BLOOM takes the softmax of attention in float32 always.
EXACT = dict.fromkeys(MODELS, (1e-9, 1e-9)) | {"bloom": (1e-7, 1e-4)}
CLIPS = dict.fromkeys(MODELS, CLIP) | {"bloom": 0.05}


def pack(root: Path) -> PackedSplit:
    prepared = root / "data" / "prepared"
    write_packs(prepared, Split.open(prepared, "train").lengths(), MAX_LENGTH)
    packed = training_rows(prepared)
    assert isinstance(packed, PackedSplit)
    assert max(len(packed.packs.of(number)) for number in range(len(packed))) > 2
    return packed


def recipe(model: str, root: Path, **changes: object) -> Path:
    usual = {
        "train.finetuning_type": "full",
        "train.learning_rate": 0.003,
        "train.num_train_epochs": 1,
        "train.global_batch": 4,
        "train.max_grad_norm": CLIPS[model],
    }
    return workspace(root, MODELS[model], **usual | changes)


Packed = Callable[[str], tuple[Path, Trained]]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    """A packed recipe and how one process trains it in float64, by model; made when first asked for."""
    made: dict[str, tuple[Path, Trained]] = {}

    def get(model: str) -> tuple[Path, Trained]:
        if model not in made:
            root = recipe(model, tmp_path_factory.mktemp(model) / "w")
            pack(root)
            made[model] = root, keep(train(root, tiny.params(), SINGLE, "float64"), tmp_path_factory)
        return made[model]

    return get


@pytest.mark.parametrize(
    ("model", "name"),
    [
        pytest.param(model, name, marks=() if (model, name) in QUICK else pytest.mark.slow)
        for model in MODELS
        for name in PLANS
    ],
)
def test_plans_agree_on_packed_rows(packed: Packed, model: str, name: str) -> None:
    root, one = packed(model)
    loss, moved = EXACT[model]
    other = train(root, tiny.params(), PLANS[name], "float64", run_key=name)
    assert_same(one, other, start_weights(root), loss, moved, CLIPS[model])


def without_samples(trained: Trained) -> Trained:
    """Numbers of rows, or of packs, are not the same; all else should be."""
    return Trained(trained.run, [record.model_copy(update={"samples": ()}) for record in trained.records])


@pytest.mark.parametrize(
    "model", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != "llama")]
)
def test_documents_train_the_same_packed_or_not(model: str, tmp_path: Path) -> None:
    """All documents are in one step, so both runs see the same; one that reads across borders does not."""
    root = recipe(model, tmp_path / "w", **{"train.num_train_epochs": 3, "train.global_batch": ROWS})
    plan = tiny.cpu_plan(1, 2, ROWS // 2)
    alone = without_samples(train(root, tiny.params(), plan, "float64", run_key="alone"))
    pack(root)
    together = without_samples(train(root, tiny.params(), plan, "float64", run_key="together"))
    loss, moved = EXACT[model]
    start = start_weights(root)
    assert_same(alone, together, start, loss, moved, CLIPS[model])
    run_ranks(1, train_blind, str(root), "blind")
    leaky = without_samples(Trained(root / "runs" / "blind", StepLog(root / "runs" / "blind").read()))
    assert abs(leaky.records[0].loss - alone.records[0].loss) > 1e-6 * alone.records[0].loss, "a weak test"
    with pytest.raises(AssertionError):
        assert_same(alone, leaky, start, loss, moved, CLIPS[model])


def train_blind(root: str, run_key: str) -> None:
    """A rank whose engine takes a packed row for one document."""
    from tasks.trainer import step_parts

    step_parts.documents_of = lambda positions, device: documents_of(  # type: ignore[attr-defined]
        torch.arange(positions.shape[1]).expand(positions.shape), device
    )
    run, plan = Path(root) / "runs" / run_key, tiny.cpu_plan(1, 2, ROWS // 2)
    run.mkdir(parents=True)
    resolved = Resolved(precision="float64", token_budget=None)
    WorkerOrder(run_key=run_key, plan=plan, resolved=resolved, starts=1).write(run / "order.json")
    _train_rank(root, run_key, None)
