"""LoRA that trains embedding table and head as well: under every plan, in every precision, and into an export."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tasks.commands.export import export
from tasks.contracts import DataManifest, FinalManifest, Precision, SplitCounts
from tasks.data.prepared import Split
from tasks.evaluate import evaluate
from tasks.params import read_params
from tasks.paths import Paths
from tasks.trainer.inference import score
from tests import tiny
from tests.distributed.compare import assert_same, start_weights, weights, workspace
from tests.distributed.ranks import Trained, train

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("one_thread")]

ONE = tiny.cpu_plan(1, 2, 4)
PLANS = {
    "ddp2": tiny.cpu_plan(2, 2, 2),
    "fsdp2": tiny.cpu_plan(1, 2, 2, shards=2),
    "tp2sp": tiny.cpu_plan(1, 2, 4, tp=2, sequence_parallel=True),
    "pp2": tiny.cpu_plan(1, 2, 4, pp=2, schedule="1f1b"),
    "tp2pp2": tiny.cpu_plan(1, 2, 4, tp=2, pp=2, schedule="1f1b"),
    "fsdp2pp2": tiny.cpu_plan(1, 2, 2, shards=2, pp=2, schedule="1f1b"),
}
TABLES = ("embed_tokens", "lm_head")
QUICK = {(True, "lora", "tp2pp2"), (False, "qlora", "fsdp2")}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bool, str], Path]:
    class Lazily(dict[tuple[bool, str], Path]):
        def __missing__(self, key: tuple[bool, str]) -> Path:
            tied, method = key
            root = tmp_path_factory.mktemp(method) / "w"
            changes = {"train.finetuning_type": method, "train.num_train_epochs": 1}
            workspace(root, {"hidden": 128, "tied": tied}, **changes, **{"train.lora.train_embeddings": True})
            self[key] = root
            return root

    return Lazily()


def run(root: Path, name: str, precision: Precision = "float64") -> Trained:
    return train(root, tiny.params(), {**PLANS, "one": ONE}[name], precision, run_key=f"{name}-{precision}")


@pytest.mark.parametrize(
    ("tied", "method", "plan"),
    [
        pytest.param(tied, method, plan, marks=() if (tied, method, plan) in QUICK else pytest.mark.slow)
        for tied in (True, False)
        for method in ("lora", "qlora")
        for plan in PLANS
    ],
)
def test_every_plan_trains_the_same_tables(
    places: dict[tuple[bool, str], Path], tied: bool, method: str, plan: str
) -> None:
    root = places[tied, method]
    one, other, start = run(root, "one"), run(root, plan), start_weights(root)
    assert_same(one, other, start, loss=1e-9, moved=1e-7, clip=0.0)
    tables = [name for name in weights(one) if any(table in name for table in TABLES)]
    assert len(tables) == (1 if tied else 2)
    assert all((weights(one)[name] - start[name]).abs().max() > 0.001 for name in tables)


@pytest.mark.parametrize("plan", ["tp2pp2", pytest.param("fsdp2pp2", marks=pytest.mark.slow)])
def test_in_bfloat16_the_tables_are_float32(places: dict[tuple[bool, str], Path], plan: str) -> None:
    """Else an update of a thousandth would be rounded away; stages pass on what the run computes in."""
    root = places[True, "qlora"]
    one, other = run(root, "one", "bfloat16"), run(root, plan, "bfloat16")
    assert {value.dtype for value in weights(one).values()} == {torch.float32}
    for left, right in zip(one.records, other.records, strict=True):
        assert abs(left.loss - right.loss) <= 0.02 * left.loss


def test_an_export_has_the_tables_and_evaluation_compares_with_the_base(
    places: dict[tuple[bool, str], Path], tmp_path: Path
) -> None:
    root = places[True, "lora"]
    paths, params = Paths(root), read_params(root / "params.yaml")
    done = run(root, "one", "float32")
    shutil.rmtree(paths.final, ignore_errors=True)
    shutil.copytree(done.run / "finished" / "final", paths.final)
    assert FinalManifest.read(paths.final / "manifest.json").embeddings_trained
    out = export(params, paths, tmp_path / "adapter", merge=False)
    held = load_file(out / "adapter_model.safetensors")
    assert [name for name in held if "lora_" not in name] == ["base_model.model.model.embed_tokens.weight"]
    base = AutoModelForCausalLM.from_pretrained(root / "model")
    ids = torch.arange(3, 35)[None]
    with torch.no_grad():
        before = base(input_ids=ids).logits
        adapted = PeftModel.from_pretrained(base, out).eval()(input_ids=ids).logits
        merged_folder = export(params, paths, tmp_path / "merged", merge=True)
        merged = AutoModelForCausalLM.from_pretrained(merged_folder).eval()
        assert (adapted - before).abs().max() > 0.01
        assert (merged(input_ids=ids).logits - adapted).abs().max() <= 1e-5 * adapted.abs().max()
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    judged_against_the_base(root)


def judged_against_the_base(root: Path) -> None:
    """Switching the adapter off would leave the trained tables."""
    paths, raw = Paths(root), read_params(root / "params.yaml")
    shutil.copyfile(paths.prepared / "train.arrow", paths.prepared / "validation.arrow")
    counts = SplitCounts(rows=26, tokens=1, target_tokens=1, longest=1)
    DataManifest(
        **{"source": "", "source_fingerprint": "", "format": "chat", "content_hash": "", "max_length": 64},
        **{"rows_in": 52, "train": counts, "validation": counts, "truncated": 0, "length_histogram": ()},
        rejected={},
    ).write(paths.manifest)
    params = raw.model_copy(update={"evaluate": raw.evaluate.model_copy(update={"samples": 0})})
    scored = evaluate(params, paths)
    split = Split.open(paths.prepared, "validation")
    base = AutoModelForCausalLM.from_pretrained(root / "model").eval()
    assert scored.base == score(base, split, list(range(26)), params.evaluate.batch_size, "base")
    assert scored.tuned.loss < scored.base.loss
