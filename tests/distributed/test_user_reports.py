"""What users of other trainers reported of training over ranks, each with its small input and the right behaviour."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from tasks.contracts import Plan
from tasks.params import read_params
from tasks.paths import Paths
from tasks.trainer.run_state import StepRecord
from tests import tiny
from tests.distributed import claims
from tests.distributed.compare import assert_same, start_weights, weights, workspace
from tests.distributed.ranks import Trained, run_ranks, train

pytestmark = pytest.mark.distributed


def of_rows(root: Path, rows: list[tuple[int, int]], **changes: object) -> Path:
    """A workspace whose rows have (tokens, learnt tokens), all in one step."""
    workspace(root, **{"train.num_train_epochs": 1, "train.global_batch": len(rows), **changes})
    draw = torch.Generator().manual_seed(9)
    ids = [torch.randint(3, 259, (length,), generator=draw).tolist() for length, _ in rows]
    labels = [
        [-100] * (len(row) - learnt) + row[len(row) - learnt :]
        for row, (_, learnt) in zip(ids, rows, strict=True)
    ]
    table = pa.table(
        {
            "input_ids": pa.array(ids, pa.list_(pa.int32())),
            "labels": pa.array(labels, pa.list_(pa.int32())),
            "id": [f"{row:04x}" for row in range(len(rows))],
            "prompt": ["[]"] * len(rows),
            "reference": [""] * len(rows),
        }
    )
    with pa.ipc.new_file(root / "data" / "prepared" / "train.arrow", table.schema) as writer:
        writer.write_table(table)
    return root


def step(root: Path, plan: Plan) -> StepRecord:
    (record,) = train(root, tiny.params(), plan, "float64", run_key=f"{plan.name}-{plan.micro_batch}").records
    return record


def same(one: StepRecord, other: StepRecord) -> bool:
    return (
        abs(one.loss - other.loss) <= 1e-9 * one.loss
        and abs(one.grad_norm - other.grad_norm) <= 1e-9 * one.grad_norm
    )


def test_accumulation_does_not_overweight_short_samples(tmp_path: Path) -> None:
    """huggingface/transformers#24725: samples of 4 and 60 tokens, accumulated or in one batch."""
    root = of_rows(tmp_path / "w", [(4, 3), (60, 59)])
    assert same(step(root, tiny.cpu_plan(1, 1, 2)), step(root, tiny.cpu_plan(1, 2, 1)))


@pytest.mark.parametrize(
    "plan", [tiny.cpu_plan(2, 1, 1), tiny.cpu_plan(1, 1, 1, shards=2)], ids=lambda plan: plan.name
)
def test_ranks_with_unequal_numbers_of_targets(tmp_path: Path, plan: Plan) -> None:
    """huggingface/transformers PR#34373: 2 targets on one rank and 8 on the other."""
    root = of_rows(tmp_path / "w", [(12, 2), (12, 8)])
    assert same(step(root, tiny.cpu_plan(1, 2, 1)), step(root, plan))


@pytest.mark.parametrize("rows", [3, 5])
def test_ranks_with_unequal_numbers_of_rows_end_together(tmp_path: Path, rows: int) -> None:
    """huggingface/datasets#6719, pytorch/pytorch#141069: ranks with 3 and 2 batches hang; axolotl PR#3100,
    mmengine#945: fewer rows than ranks x batch give no step at all."""
    root = of_rows(tmp_path / "w", [(8 + row, 3 + row) for row in range(rows)], **{"train.global_batch": 8})
    one = step(root, tiny.cpu_plan(1, 8, 1))
    two = step(root, tiny.cpu_plan(2, 4, 1) if rows == 3 else tiny.cpu_plan(2, 1, 4))
    assert sorted(two.samples) == list(range(rows)), "one step, of all rows"
    assert same(one, two)


@pytest.mark.parametrize(
    "plan",
    [
        tiny.cpu_plan(1, 2, 2, shards=2),
        tiny.cpu_plan(1, 2, 4, tp=2),
        tiny.cpu_plan(1, 2, 4, pp=2, schedule="1f1b"),
    ],
    ids=lambda plan: plan.name,
)
def test_a_sharded_adapter_is_saved_whole(lora: Path, lora_single: Trained, plan: Plan) -> None:
    """huggingface/trl#4416, huggingface/peft#2450: empty adapter files and tensors of size 0."""
    other = weights(train(lora, tiny.params(), plan, run_key="whole"))
    shapes = {name: value.shape for name, value in weights(lora_single).items()}
    assert {name: value.shape for name, value in other.items()} == shapes
    assert all(value.numel() for value in other.values())


def test_float16_trains_float32_weights(tmp_path: Path) -> None:
    """haotian-liu/LLaVA#363: a run whose trainable weights are float16 themselves fails or gives no numbers."""
    root = workspace(tmp_path / "w", **{"train.num_train_epochs": 1, "train.learning_rate": 1e-3})
    done = train(root, tiny.params(), tiny.cpu_plan(1, 2, 4), "float16")
    assert all(value.dtype == torch.float32 for value in weights(done).values())
    assert all(0 < record.loss < 10 for record in done.records)


def test_both_copies_of_a_tied_table_in_a_pipeline(tmp_path: Path) -> None:
    """uw-syfi/piper#13: the gradients of the two copies were not summed."""
    changes = {"train.finetuning_type": "full", "train.learning_rate": 0.003, "train.num_train_epochs": 1}
    root = workspace(tmp_path / "w", {"tied": True}, **changes)
    one = train(root, tiny.params(), tiny.cpu_plan(1, 2, 4), "float64", run_key="one")
    two = train(root, tiny.params(), tiny.cpu_plan(1, 2, 4, pp=2, schedule="1f1b"), "float64", run_key="two")
    assert_same(one, two, start_weights(root), loss=1e-9, moved=1e-9)


def stay_tied(root: str, plans: list[Plan]) -> None:
    """Both names are one parameter with the file's numbers, before and after a step."""
    import torch.distributed as dist

    from tasks.trainer.loading import open_base
    from tasks.trainer.torch_engine import TorchEngine

    dist.init_process_group("gloo")
    params = read_params(Path(root) / "params.yaml")
    table = load_file(Path(root) / "model" / "model.safetensors")["model.embed_tokens.weight"]
    for plan in plans:
        base = open_base(Paths(Path(root)), torch.float32)
        assert base.model.lm_head.weight is base.model.model.embed_tokens.weight
        engine = TorchEngine(base, params.train, plan, "float32", 10, params.seed)
        model = engine.model
        assert torch.equal(claims.whole(model.lm_head.weight), table)
        engine.train_step(*claims._share(0, plan), ())
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert not torch.equal(claims.whole(model.model.embed_tokens.weight), table)


def test_tied_tables_of_a_model_that_is_built_empty(tmp_path: Path) -> None:
    """verl-project/verl#7834: on the meta device the tie is lost unseen, or every rank loads everything.

    What loading takes is in test_loading.py.
    """
    changes = {"train.finetuning_type": "full", "train.learning_rate": 0.003}
    root = workspace(tmp_path / "w", {"tied": True}, **changes)
    empty = torch.nn.ModuleList([torch.nn.Linear(4, 4, device="meta"), torch.nn.Linear(4, 4, device="meta")])
    empty[1].weight = empty[0].weight
    empty.to_empty(device="cpu")
    assert empty[1].weight is not empty[0].weight, "torch's own way of making room unties"
    run_ranks(2, stay_tied, str(root), [tiny.cpu_plan(2, 2, 2), tiny.cpu_plan(1, 2, 2, shards=2)])


def test_rows_and_rates_of_a_run_stopped_in_its_second_epoch(tmp_path: Path) -> None:
    """modelscope/ms-swift#10050, huggingface/transformers#34053: 12 rows, two epochs, stopped in the second."""
    changes = {"train.num_train_epochs": 2, "train.global_batch": 2, "train.lr_scheduler_type": "linear"}
    root = of_rows(
        tmp_path / "w", [(8, 4)] * 12, **{**changes, "train.warmup_ratio": 0.0, "train.learning_rate": 1e-5}
    )
    plan = tiny.cpu_plan(1, 2, 1)
    whole = train(root, tiny.params(), plan, run_key="whole").records
    assert len(whole) == 12
    stopped = train(root, tiny.params(), plan, run_key="x", stop_at=8).records
    assert 8 <= len(stopped) < 12
    resumed = train(root, tiny.params(), plan, run_key="x", fresh=False).records
    for name in ("samples", "learning_rate", "loss", "grad_norm"):
        assert [getattr(record, name) for record in resumed] == [getattr(record, name) for record in whole], (
            name
        )
    for epoch in (whole[:6], whole[6:]):
        assert sorted(sample for record in epoch for sample in record.samples) == list(range(12))


def test_a_run_of_two_ranks_goes_on_with_one_and_with_three(tmp_path: Path) -> None:
    """deepspeedai/DeepSpeed#2898 and #5405: another number of GPUs was refused deep inside the engine."""
    changes = {"train.global_batch": 6, "train.finetuning_type": "full", "train.learning_rate": 0.003}
    root = workspace(tmp_path / "w", **changes)
    two = tiny.cpu_plan(1, 1, 3, shards=2)
    whole = train(root, tiny.params(), two, "float64", run_key="whole")
    for plan in (tiny.cpu_plan(1, 3, 2), tiny.cpu_plan(1, 2, 1, shards=3)):
        train(root, tiny.params(), two, "float64", run_key="x", stop_at=4)
        resumed = train(root, tiny.params(), plan, "float64", run_key="x", fresh=False)
        assert_same(whole, resumed, start_weights(root), loss=1e-9, moved=1e-9)


@pytest.mark.parametrize(
    "plan",
    [tiny.cpu_plan(1, 2, 1, tp=2), tiny.cpu_plan(1, 1, 2, pp=2, schedule="1f1b")],
    ids=lambda plan: plan.name,
)
def test_one_gradient_norm_over_slices_and_stages(tmp_path: Path, plan: Plan) -> None:
    """meta-pytorch/torchtune#2420, pytorch/torchtitan#596: each stage clipped by a norm of its own."""
    root = of_rows(tmp_path / "w", [(9, 5), (14, 3)], **{"train.finetuning_type": "full"})
    one = step(root, tiny.cpu_plan(1, 2, 1))
    assert one.grad_norm > 0.5, "the clip must bite"
    assert same(one, step(root, plan))


def test_an_incomplete_export_is_refused(tmp_path: Path) -> None:
    """The save checks itself: a parameter that is missing, or not whole, is named."""
    from tasks.trainer.training_state import check_whole

    model = torch.nn.Linear(3, 2)
    whole = {name: value.detach() for name, value in model.named_parameters()}
    check_whole(model, whole)
    with pytest.raises(RuntimeError, match=r"weight should have shape .*\[2, 3\].* and has .*\[0\]"):
        check_whole(model, whole | {"weight": torch.empty(0)})
    with pytest.raises(RuntimeError, match="bias"):
        check_whole(model, {"weight": whole["weight"]})


def test_an_adapter_opens_on_the_base_it_names(lora: Path, lora_single: Trained) -> None:
    final = lora_single.run / "finished" / "final"
    config = json.loads((final / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] == str(lora / "model")
    assert load_file(final / "adapter_model.safetensors").keys() == weights(lora_single).keys()
