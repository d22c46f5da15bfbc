"""Added tokens: every plan trains the base with a row for each, and what was trained opens where it says.

unslothai/unsloth#237, huggingface/transformers#40382, X-Square-Robot/wall-x#114: adapters and sharded checkpoints had
another vocabulary size than the base they were loaded on.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tasks.commands.export import export
from tasks.params import read_params
from tasks.paths import Paths
from tasks.trainer.base_model import ensure_base
from tasks.trainer.loading import load_tuned
from tests import tiny
from tests.distributed.compare import assert_same, start_weights, workspace
from tests.distributed.ranks import train

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("one_thread")]

ROWS, NEW = 259, ["<tool>", "</tool>", "<call>", "</call>"]
ONE = tiny.cpu_plan(1, 2, 4)
PLANS = {
    "tp2": tiny.cpu_plan(1, 2, 4, tp=2),
    "pp2": tiny.cpu_plan(1, 2, 4, pp=2, schedule="1f1b"),
    "fsdp2": tiny.cpu_plan(1, 2, 2, shards=2),
}
# In float64, but llama's norms round to float32, and equal rows round alike at every place of a text.
LOSS, MOVED = 1e-6, 1e-4
Made = Callable[[str], Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """method -> a workspace whose rows hold the new tokens; 263 rows are not even over two ranks."""
    known: dict[str, Path] = {}

    def make(method: str) -> Path:
        root = tmp_path_factory.mktemp(method) / "w"
        changes = {"train.finetuning_type": method, "train.num_train_epochs": 1, "train.learning_rate": 0.003}
        workspace(root, {"hidden": 128, "tied": True}, **changes)
        tokenizer = AutoTokenizer.from_pretrained(root / "model")
        tokenizer.add_tokens(NEW)
        tokenizer.save_pretrained(root / "model")
        file = root / "data" / "prepared" / "train.arrow"
        with pa.memory_map(str(file)) as source:
            table = pa.ipc.open_file(source).read_all()
        for column in ("input_ids", "labels"):
            ids = [
                [ROWS + id % 4 if id > 0 and id % 5 == 0 else id for id in row]
                for row in table[column].to_pylist()
            ]
            place = table.column_names.index(column)
            table = table.set_column(place, column, pa.array(ids, pa.list_(pa.int32())))
        file.unlink()  # it is still mapped
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        ref = ensure_base(read_params(root / "params.yaml").model, Paths(root), ROWS + 3)
        assert (ref.vocabulary, ref.added_tokens) == (ROWS + 4, 4)
        return root

    def of(method: str) -> Path:
        if method not in known:
            known[method] = make(method)
        return known[method]

    return of


def start(root: Path, method: str) -> dict[str, torch.Tensor]:
    return (
        load_file(root / "data" / "base" / "model.safetensors") if method == "full" else start_weights(root)
    )


@pytest.mark.parametrize(
    ("method", "plan"),
    [
        ("full", "pp2"),
        ("full", "tp2"),
        ("full", "fsdp2"),
        ("lora", "tp2"),
        ("lora", "pp2"),
        ("qlora", "tp2"),
    ],
)
@pytest.mark.slow
def test_every_plan_trains_the_same_model(made: Made, method: str, plan: str) -> None:
    root = made(method)
    one = train(root, tiny.params(), ONE, "float64", run_key="one")
    two = train(root, tiny.params(), PLANS[plan], "float64", run_key=plan)
    assert_same(one, two, start(root, method), loss=LOSS, moved=MOVED, clip=0.0)


def test_a_sharded_checkpoint_is_gone_on_with(made: Made) -> None:
    root = made("full")
    one = train(root, tiny.params(), ONE, "float64", run_key="one")
    train(root, tiny.params(), PLANS["pp2"], "float64", run_key="x", stop_at=2)
    two = train(root, tiny.params(), PLANS["tp2"], "float64", run_key="x", fresh=False)
    assert_same(one, two, start(root, "full"), loss=LOSS, moved=MOVED, clip=0.0)


@pytest.mark.parametrize("method", ["lora", pytest.param("qlora", marks=pytest.mark.slow)])
def test_an_adapter_brings_the_rows(
    made: Made, method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = made(method)
    paths, params = Paths(root), read_params(root / "params.yaml")
    run = train(root, params, ONE, run_key="final").run
    shutil.rmtree(paths.final, ignore_errors=True)
    shutil.copytree(run / "finished" / "final", paths.final)
    assert not any("embed" in name for name in load_file(paths.final / "adapter_model.safetensors"))
    out = export(params, paths, tmp_path / "out", merge=False)
    assert "(first `base.resize_token_embeddings(263)`: it has 4 token(s) more)" in capsys.readouterr().err
    tuned, _ = load_tuned(paths)
    ids = torch.tensor([[5, 6, ROWS, 7, ROWS + 3, 8]])
    if method == "lora":
        base = AutoModelForCausalLM.from_pretrained(root / "model")
        with pytest.raises(RuntimeError, match=r"size mismatch .*\[263, 128\].*\[259, 128\]"):
            PeftModel.from_pretrained(base, out)
        base = AutoModelForCausalLM.from_pretrained(root / "model")
        base.resize_token_embeddings(len(AutoTokenizer.from_pretrained(out)))
        same(PeftModel.from_pretrained(base, out).eval(), tuned, ids)
    merged = export(params, paths, tmp_path / "merged", merge=True)
    same(AutoModelForCausalLM.from_pretrained(merged).eval(), tuned, ids)
    assert AutoTokenizer.from_pretrained(merged)("<call>")["input_ids"] == [ROWS + 2]


def same(one: torch.nn.Module, other: torch.nn.Module, ids: torch.Tensor) -> None:
    with torch.no_grad():
        left, right = (model(input_ids=ids).logits for model in (one, other))
    assert left.shape[-1] == ROWS + 4
    assert (left - right).abs().max() <= 1e-5 * right.abs().max()
