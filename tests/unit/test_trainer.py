"""Parts of the trainer in one process: the loss, checkpoints on disk, locks, advice."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.nn import functional

from tasks.contracts import CheckpointManifest
from tasks.data.order import MicroBatch
from tasks.data.prepared import Split
from tasks.errors import UserError
from tasks.params import ModelParams
from tasks.paths import Paths
from tasks.train import _timed
from tasks.trainer.base_model import ensure_base, find_source, weights_folder
from tasks.trainer.checkpoint import complete_checkpoints
from tasks.trainer.guards import check_finite, hold_as_worker, run_lock
from tasks.trainer.loading import load_base
from tasks.trainer.loop import collate
from tasks.trainer.loss import TokenLossSum
from tasks.trainer.loss_scale import LossScale
from tasks.trainer.pieces import Box, boxes_of
from tasks.trainer.run_state import StepLog, StepRecord
from tasks.trainer.tensor_parallel import Cut
from tasks.trainer.training_state import read_weights
from tests import tiny


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("model") / "m")


def wanted(folder: Path | str) -> ModelParams:
    return ModelParams(name_or_path=str(folder), revision=None, trust_remote_code=False)


def split(rows: list[list[int]], learnt: list[list[int]]) -> Split:
    return Split(pa.table({"input_ids": pa.array(rows), "labels": pa.array(learnt)}))


# --- loss ---------------------------------------------------------------------------------------


def test_the_loss_counts_each_learnt_token_once_whatever_the_padding(
    model_folder: Path, tmp_path: Path
) -> None:
    ensure_base(wanted(model_folder), Paths(tmp_path))
    model = load_base(Paths(tmp_path), torch.float32)
    rows = split([[5, 6, 7, 8], [9, 10]], [[-100, 6, -100, 8], [9, 10]])
    batch = collate(rows, MicroBatch((0, 1), True))
    with torch.no_grad():
        together = TokenLossSum(model, model, "float32")(batch.input_ids, batch.labels)
        alone = 0.0
        for ids, targets in (([5, 6, 7, 8], {1: 6, 3: 8}), ([9, 10], {1: 10})):
            logits = model(input_ids=torch.tensor([ids])).logits[0]
            for position, target in targets.items():
                alone -= float(functional.log_softmax(logits[position - 1], -1)[target])
    assert math.isclose(float(together), alone, rel_tol=1e-6)
    assert rows.target_counts().tolist() == [2, 1], "the first token of a row is never predicted"


def test_a_full_head_and_a_plain_head_agree(model_folder: Path, tmp_path: Path) -> None:
    ensure_base(wanted(model_folder), Paths(tmp_path))
    model = load_base(Paths(tmp_path), torch.float32)
    batch = collate(split([[5, 6, 7], [9, 10, 3]], [[-100, 6, 7], [-100, -100, 3]]), MicroBatch((0, 1), True))
    plain, whole = TokenLossSum(model, model, "float32"), TokenLossSum(model, model, "float32")
    whole.plain_head = False
    assert plain.plain_head
    assert torch.allclose(
        plain(batch.input_ids, batch.labels), whole(batch.input_ids, batch.labels), rtol=1e-6
    )


def test_a_stand_in_has_loss_zero_and_gradient_zero(model_folder: Path, tmp_path: Path) -> None:
    ensure_base(wanted(model_folder), Paths(tmp_path))
    model = load_base(Paths(tmp_path), torch.float32)
    batch = collate(split([[5, 6, 7]], [[5, 6, 7]]), MicroBatch((0,), False))
    loss = TokenLossSum(model, model, "float32")(batch.input_ids, batch.labels)
    loss.backward()
    assert loss.item() == 0.0
    gradients = [weight.grad for weight in model.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


# --- base model ---------------------------------------------------------------------------------


def test_a_changed_model_is_noticed(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "m")
    paths = Paths(tmp_path)
    ref = ensure_base(wanted(folder), paths)
    assert weights_folder(ref, paths) == folder
    tiny.write_model(folder, seed=1)
    with pytest.raises(UserError, match="not those the data was prepared for"):
        weights_folder(ref, paths)
    assert ensure_base(wanted(folder), paths).content_hash != ref.content_hash


def test_a_folder_without_weights_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="has no weights"):
        ensure_base(wanted(folder), Paths(tmp_path))
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("name", ["/no/such/folder", "no-such-name", "gone.gguf"])
def test_a_model_that_is_not_there_names_itself(name: str) -> None:
    with pytest.raises(UserError, match=r"model\.name_or_path=" + name.replace(".", r"\.")):
        find_source(wanted(name))


# --- state on disk ------------------------------------------------------------------------------


def manifest(step: int) -> CheckpointManifest:
    return CheckpointManifest(run_key="k", step=step, samples_seen=step, world_size=1, plan=tiny.cpu_plan())


def test_a_checkpoint_without_manifest_does_not_count(tmp_path: Path) -> None:
    for step in (3, 1):
        manifest(step).write(tmp_path / "checkpoints" / f"step-{step:08d}" / "manifest.json")
    (tmp_path / "checkpoints" / "step-00000009").mkdir()
    manifest(7).write(tmp_path / "checkpoints" / ".step-00000007" / "manifest.json")
    assert [item[1].step for item in complete_checkpoints(tmp_path)] == [1, 3]


def parts_of_two_in_one(
    whole: torch.Tensor, ranks: int, shards: int
) -> Iterator[tuple[torch.Tensor, tuple[ChunkStorageMetadata, ...]]]:
    """Tensor parallelism cuts each half over ranks, FSDP2 then a rank's part over shards."""
    half = len(whole) // 2
    size = half // ranks
    for first in range(0, half, size):
        spans = ((first, size), (half + first, size))
        part = torch.cat([whole[start : start + size] for start, _ in spans])
        begin = 0
        for shard in part.chunk(shards):
            yield shard, tuple(boxes_of((begin, 0), shard.shape, Cut(0, spans, whole.shape)))
            begin += len(shard)


def test_parts_of_two_matrices_in_one_are_read_by_any_other_layout(tmp_path: Path) -> None:
    whole = torch.arange(36.0 * 5).view(36, 5)
    written = Box.of(whole, whole.shape, ())
    for shard, boxes in parts_of_two_in_one(whole, 2, 4):
        written.inside |= Box.of(shard, whole.shape, boxes).inside
    assert len(written.inside) == 2 * (4 + 1), "one shard in four has rows of both halves"
    dcp.save({"model": {"w": written}}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(read_weights(tmp_path, None)["w"], whole)
    for expected, boxes in parts_of_two_in_one(whole, 3, 5):
        read = torch.zeros_like(expected)
        dcp.load({"model": {"w": Box.of(read, whole.shape, boxes)}}, checkpoint_id=tmp_path, no_dist=True)
        assert torch.equal(read, expected)


def record(step: int) -> StepRecord:
    return StepRecord(
        step=step, loss=1, grad_norm=1, learning_rate=1, tokens=1, target_tokens=1, seconds=1, samples=(1,)
    )


def test_half_a_line_in_the_step_log_is_dropped(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    for step in (1, 2, 3):
        log.append(record(step))
    log.path.write_text(log.path.read_text()[:-20])
    assert [item.step for item in log.read()] == [1, 2]
    log.cut(1)
    assert [item.step for item in log.read()] == [1]


# --- guards -------------------------------------------------------------------------------------


def test_a_second_train_stage_is_refused(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, time\nfrom tasks.trainer.guards import run_lock\n"
        "with run_lock(pathlib.Path(sys.argv[1])):\n print('held', flush=True); time.sleep(60)\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "r")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(UserError, match=f"process {holder.pid} is already training"),
            run_lock(tmp_path / "r"),
        ):
            pass
    finally:
        holder.kill()
        holder.wait()
    with run_lock(tmp_path / "r"):
        pass


def test_a_new_stage_waits_for_the_workers_of_a_killed_one(tmp_path: Path) -> None:
    import threading

    worker = hold_as_worker(tmp_path)
    threading.Timer(0.6, worker.close).start()
    begin = time.monotonic()
    with run_lock(tmp_path):
        assert time.monotonic() - begin >= 0.5


def test_numbers_that_are_none_stop_the_run() -> None:
    with pytest.raises(UserError, match="step 3: loss=nan"):
        check_finite(math.nan, 1.0, 3, "bfloat16")
    with pytest.raises(UserError, match="gradient norm=inf"):
        check_finite(1.0, math.inf, 3, "float32")
    check_finite(1.0, math.inf, 3, "float16")
    with pytest.raises(UserError, match=r"gradient norm=nan, .*the checkpoint of step 2 is kept"):
        check_finite(1.0, math.nan, 3, "float32", saved=2)


# --- float16 ------------------------------------------------------------------------------------


def test_a_loss_scale_halves_doubles_and_gives_up() -> None:
    scale = LossScale(enabled=True)
    scale.update(finite=False)
    assert scale.value == 2.0**15
    for _ in range(2000):
        scale.update(finite=True)
    assert scale.value == 2.0**16
    with pytest.raises(UserError, match="gradients overflow at every step"):
        for _ in range(40):
            scale.update(finite=False)
    assert LossScale(enabled=False).value == 1.0


def test_no_numbers_name_a_wider_precision_only_if_there_is_one() -> None:
    with pytest.raises(UserError, match=r"step 3: .*use train.precision=float32$"):
        check_finite(math.nan, 1.0, 3, "bfloat16")
    with pytest.raises(UserError, match=r"lower train.learning_rate$"):
        check_finite(math.inf, 1.0, 3, "float32")


def test_a_performance_report_of_an_earlier_version_counts_as_none(tmp_path: Path) -> None:
    file = tmp_path / "train_performance.json"
    assert not _timed(file, "key")
    file.write_text('{"run_key": "key", "ranks": [{"rank": 0, "compute": 0.9}]}')
    assert not _timed(file, "key")
