"""What users of other trainers reported of training under ZeRO, each with its small input and the right behaviour."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tasks.contracts import Plan
from tasks.trainer.checkpoint import complete_checkpoints
from tasks.trainer.run_state import StepLog
from tests import tiny
from tests.distributed.compare import assert_same, start_weights, weights, workspace
from tests.distributed.ranks import _train_rank, run_ranks, train
from tests.distributed.test_added_tokens import NEW, ROWS, Made, made
from tests.distributed.test_zero import zero

pytest.importorskip("deepspeed", reason="DeepSpeed is for Linux alone")
pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("one_thread")]

SINGLE = tiny.cpu_plan(1, 2, 4)
ONE_EPOCH = {"train.num_train_epochs": 1}
OFFLOADED = zero("zero3", offload="cpu", offload_parameters="cpu")
__all__ = ["made"]  # a fixture


# --- adapters are saved whole -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tied", "plan"),
    [
        (False, zero("zero3")),
        pytest.param(True, OFFLOADED, marks=pytest.mark.slow),
        pytest.param(True, zero("zero1"), marks=pytest.mark.slow),
    ],
    ids=["zero3", "offloaded", "zero1"],
)
def test_adapters_and_tables_are_saved_whole(tied: bool, plan: Plan, tmp_path: Path) -> None:
    """huggingface/trl#4416, huggingface/peft#2450: empty adapter files and tensors of size 0, seen when merging."""
    changes = {"train.lora.train_embeddings": True, "train.learning_rate": 0.003, **ONE_EPOCH}
    root = workspace(tmp_path / "w", {"tied": tied}, **changes)
    one = train(root, tiny.params(), SINGLE, run_key="one")
    other = train(root, tiny.params(), plan, run_key="zero")
    whole, found = weights(one), weights(other)
    assert {name: value.shape for name, value in found.items()} == {
        name: value.shape for name, value in whole.items()
    }
    assert sum("lora_" in name for name in found) == 2 * 7 * 2 and any(
        "embed_tokens" in name for name in found
    )
    assert all(value.dtype == torch.float32 and bool(value.any()) for value in found.values())
    assert_same(one, other, start_weights(root), loss=1e-4, moved=2e-2)


def save_what_is_gathered(root: str, run_key: str) -> None:
    """The reported mistake: under ZeRO-3 a parameter is empty unless it is gathered, and is saved as it is."""
    from tasks.trainer.zero_state import ZeroState

    boxes = ZeroState.boxes

    def empty(self: ZeroState) -> dict[str, Any]:
        state = boxes(self)
        state["model"] = {name: torch.empty(0) for name in state["model"]}
        return state

    ZeroState.boxes = empty  # type: ignore[method-assign]
    _train_rank(root, run_key, None)


def test_empty_tensors_are_no_export(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    root = workspace(tmp_path / "w", **ONE_EPOCH)
    plan = zero("zero3", 1, 4)
    order(root, plan, "x")
    with pytest.raises(
        AssertionError, match=r"does not hold what was trained: .*should have shape .* nothing was"
    ):
        run_ranks(1, save_what_is_gathered, str(root), "x")
    finished = root / "runs" / "x" / "finished"
    assert not (finished / "complete").exists() and not list(finished.rglob("*.safetensors"))


def order(root: Path, plan: Plan, run_key: str, precision: str = "float32") -> Path:
    from tasks.contracts import Resolved
    from tasks.trainer.worker import WorkerOrder

    run = root / "runs" / run_key
    run.mkdir(parents=True, exist_ok=True)
    resolved = Resolved.model_validate({"precision": precision, "token_budget": None})
    WorkerOrder(run_key=run_key, plan=plan, resolved=resolved, starts=1).write(run / "order.json")
    return run


# --- float16 and steps that give no numbers -----------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("plan", [zero(f"zero{stage}") for stage in (0, 2, 3)], ids=lambda plan: plan.name)
def test_float16_trains_float32_weights_of_a_half_base(plan: Plan, tmp_path: Path) -> None:
    """haotian-liu/LLaVA#363: a base in float16, AdamW at 1e-3, and trainable weights that were float16 themselves."""
    root = workspace(tmp_path / "w", {"half": True}, **{"train.learning_rate": 1e-3, **ONE_EPOCH})
    one = train(root, tiny.params(), SINGLE, "float16", run_key="one")
    other = train(root, tiny.params(), plan, "float16", run_key="zero")
    for left, right in zip(one.records, other.records, strict=True):
        assert abs(left.loss - right.loss) <= 2e-2 * left.loss and 0 < right.loss < 10
    found = weights(other)
    assert all(value.dtype == torch.float32 and bool(value.isfinite().all()) for value in found.values())


def no_number_on_the_last_rank(root: str, run_key: str, step: int) -> None:
    """One rank's loss of a step is no number; the rest is the real worker, as the train stage starts it."""
    from tasks.trainer import worker
    from tasks.trainer.deepspeed_engine import DeepSpeedEngine
    from tasks.trainer.torch_engine import TorchEngine

    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    for engine in (DeepSpeedEngine, TorchEngine):
        _spoil(engine, step if last else 0)
    os.chdir(root)
    sys.argv = ["worker", run_key]
    worker.main()


def _spoil(engine: type, step: int) -> None:
    loss, train_step = engine._loss_sum, engine.train_step  # type: ignore[attr-defined]
    taken = [0]

    def counted(self: object, *arguments: object) -> object:
        taken[0] += 1
        return train_step(self, *arguments)

    def spoilt(self: object, batch: object) -> torch.Tensor:
        summed: torch.Tensor = loss(self, batch)
        return summed * float("nan") if taken[0] == step else summed

    engine.train_step, engine._loss_sum = counted, spoilt  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("plan", "precision"),
    [
        (zero("zero2"), "float16"),
        pytest.param(zero("zero3"), "float32", marks=pytest.mark.slow),
        pytest.param(zero("zero0"), "float16", marks=pytest.mark.slow),
        pytest.param(zero("zero2", offload="cpu"), "float32", marks=pytest.mark.slow),
        pytest.param(tiny.cpu_plan(2, 2, 2), "float16", marks=pytest.mark.slow),
        pytest.param(tiny.cpu_plan(1, 2, 2, shards=2), "float32", marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_a_loss_that_is_no_number_stops_and_the_last_good_checkpoint_stays(
    plan: Plan, precision: str, tmp_path: Path
) -> None:
    """haotian-liu/LLaVA#363 and others: a run that goes on with NaN saves it over all that was trained."""
    root = workspace(tmp_path / "w", {"half": precision == "float16"}, **ONE_EPOCH)
    run = order(root, plan, "x", precision)
    run_ranks(2, no_number_on_the_last_rank, str(root), "x", 3, code=2)
    said = (run / "user_error").read_text(encoding="utf-8")
    assert said.startswith("step 3: loss=nan") and "checkpoint of step 2" in said
    assert [manifest.step for _, manifest in complete_checkpoints(run)][-1] == 2
    assert len(StepLog(run).read()) == 2 and not (run / "finished").exists()
    resumed = train(root, tiny.params(), plan, precision, run_key="x", fresh=False)  # type: ignore[arg-type]
    assert len(resumed.records) == 4
    found = weights(resumed)
    assert all(value.dtype == torch.float32 and bool(value.isfinite().all()) for value in found.values())


# --- other numbers of ranks, other vocabularies -------------------------------------------------


@pytest.mark.parametrize("stage", ["zero2", pytest.param("zero3", marks=pytest.mark.slow)])
def test_a_run_of_two_ranks_goes_on_with_one_and_then_with_three(stage: str, tmp_path: Path) -> None:
    """deepspeedai/DeepSpeed#2898 and #5405: another number of GPUs was refused deep inside the engine."""
    changes = {
        "train.global_batch": 6,
        "train.finetuning_type": "full",
        "train.learning_rate": 0.003,
        **ONE_EPOCH,
    }
    root = workspace(tmp_path / "w", **changes)
    two = zero(stage, 2, 3, micro_batch=1)
    whole = train(root, tiny.params(), two, run_key="whole")
    train(root, tiny.params(), two, run_key="x", stop_at=1)
    part = train(root, tiny.params(), zero(stage, 1, 3), run_key="x", stop_at=3, fresh=False)
    assert len(part.records) == 4 < len(whole.records) == 5, "the wish to stop travels with the next step"
    last = train(root, tiny.params(), zero(stage, 3, 1), run_key="x", fresh=False)
    assert_same(whole, last, start_weights(root), loss=2e-5, moved=5e-3)


@pytest.mark.slow
def test_a_vocabulary_with_added_tokens(made: Made) -> None:
    """unslothai/unsloth#237, X-Square-Robot/wall-x#114: sharded checkpoints had another size than the base.

    263 rows are not even over two ranks, and the engines read each other's checkpoints of them.
    """
    root = made("full")
    one = train(root, tiny.params(), SINGLE, run_key="single32")
    train(root, tiny.params(), zero("zero3"), run_key="x", stop_at=2)
    two = train(root, tiny.params(), zero("zero2", 1, 4), run_key="x", fresh=False)
    base = root / "data" / "base" / "model.safetensors"
    assert_same(one, two, load_file(base), loss=1e-4, moved=2e-2, clip=0.0)
    table = weights(two)["model.embed_tokens.weight"]
    assert table.shape[0] == ROWS + len(NEW)
