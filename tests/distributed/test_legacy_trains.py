"""A converted model trains as any other: LoRA learns, and a model that is cut takes the same steps as a whole one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tasks.commands.export import export
from tasks.contracts import Precision
from tasks.params import read_params
from tasks.paths import Paths
from tasks.trainer.base_model import ensure_base
from tasks.trainer.inference import generate
from tasks.trainer.legacy.table import read_object
from tasks.trainer.loading import load_base, load_tokenizer, load_tuned
from tasks.trainer.run_state import StepRecord
from tests import tiny
from tests.distributed.compare import CHANGES, assert_same, keep, start_weights, weights, workspace
from tests.distributed.ranks import Trained, train
from tests.unit import legacy_cases
from tests.unit.legacy_reference import reference

pytestmark = pytest.mark.distributed

KIND = "baichuan2-13b"


def recipe(kind: str, root: Path, method: str = "lora", epochs: int = 3) -> Path:
    """The usual rows on a published folder; an epoch of 26 rows is three full steps and a short one."""
    workspace(root)
    folder = legacy_cases.write(root / "published", kind)
    if (kind, method) == (KIND, "lora"):
        as_chat(folder)
    changes = {
        "model.name_or_path": str(folder),
        "train.finetuning_type": method,
        "train.num_train_epochs": epochs,
    }
    if method == "full":
        changes["train.learning_rate"] = 0.003
    tiny.write_params(root, **{**CHANGES, **changes})
    ensure_base(read_params(root / "params.yaml").model, Paths(root))
    return root


def as_chat(folder: Path) -> None:
    """What a published chat model says besides, and its code."""
    (folder / "modeling_baichuan.py").write_text("raise SystemExit('run')\n")
    flags = {"tokenizer_class": "BaichuanTokenizer", "add_bos_token": True, "add_eos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(flags))
    roles = {"user_token_id": 197, "assistant_token_id": 198, "max_new_tokens": 2048, "top_k": 5}
    (folder / "generation_config.json").write_text(json.dumps(roles))


def learnt(epoch: list[StepRecord]) -> float:
    return sum(step.loss * step.target_tokens for step in epoch) / sum(step.target_tokens for step in epoch)


def moved(trained: Trained) -> bool:
    """Every adapter's second factor begins at zero."""
    return all(value.abs().max() > 0 for name, value in weights(trained).items() if "lora_B" in name)


CUTS = {
    "qwen": tiny.cpu_plan(1, 2, 4, tp=2),
    "baichuan2": tiny.cpu_plan(1, 2, 4, pp=2, schedule="1f1b"),
    "chatglm3": tiny.cpu_plan(1, 2, 4, tp=2, sequence_parallel=True),
}


@pytest.mark.parametrize("kind", CUTS)
def test_lora_trains_on_a_converted_model(kind: str, tmp_path: Path) -> None:
    root = recipe(kind, tmp_path / "w")
    one = train(root, tiny.params(), tiny.cpu_plan(1, 2, 4))
    assert len(one.records) == 12 and moved(one)
    first, last = one.records[:4], one.records[-4:]
    assert learnt(last) < learnt(first), "the same rows, two epochs later"
    cut = train(root, tiny.params(), CUTS[kind], run_key="cut")
    for left, right in zip(one.records, cut.records, strict=True):
        assert abs(left.loss - right.loss) <= 1e-5 * left.loss


# --- Baichuan-13B, whose class is this project's ------------------------------------------------

IDS = torch.randint(3, 560, (2, 17), generator=torch.Generator().manual_seed(5))
PLANS = {
    "ddp2": tiny.cpu_plan(2, 2, 2),
    "fsdp2": tiny.cpu_plan(1, 2, 2, shards=2),
    "tp2": tiny.cpu_plan(1, 2, 4, tp=2),
    "tp2sp": tiny.cpu_plan(1, 2, 4, tp=2, sequence_parallel=True),
    "pp2": tiny.cpu_plan(1, 2, 4, pp=2, schedule="1f1b"),
    "tp2pp2": tiny.cpu_plan(1, 2, 4, tp=2, pp=2, schedule="1f1b"),
    "fsdp2tp2sp": tiny.cpu_plan(1, 2, 2, shards=2, tp=2, sequence_parallel=True),
    "fsdp2pp2": tiny.cpu_plan(1, 2, 2, shards=2, pp=2, schedule="1f1b"),
}
QUICK = {"full": ("tp2sp", "pp2"), "lora": ("fsdp2",)}
CASES = [
    pytest.param(method, name, marks=() if name in QUICK[method] else pytest.mark.slow)
    for method in ("full", "lora")
    for name in PLANS
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, Precision], tuple[Path, Trained]]:
    """Baichuan2-13B by one process, by method and precision, trained when first asked for."""

    class Lazily(dict[tuple[str, Precision], tuple[Path, Trained]]):
        def __missing__(self, key: tuple[str, Precision]) -> tuple[Path, Trained]:
            method, precision = key
            root = recipe(KIND, tmp_path_factory.mktemp(method) / "w", method, epochs=1)
            one = train(root, tiny.params(), tiny.cpu_plan(1, 2, 4), precision)
            self[key] = root, keep(one, tmp_path_factory)
            return self[key]

    return Lazily()


@pytest.mark.parametrize(("method", "name"), CASES)
def test_a_13b_is_the_same_under_every_plan(
    alone: dict[tuple[str, Precision], tuple[Path, Trained]], method: str, name: str
) -> None:
    root, one = alone[method, "float64"]
    other = train(root, tiny.params(), PLANS[name], "float64", run_key=name)
    if method == "full":
        start = load_file(root / "data" / "base" / "model.safetensors")
    else:
        start = start_weights(root)
    assert_same(one, other, start, loss=1e-9, moved=1e-9)


# Every matrix can be cut over two ranks at blocks of 64.
WIDE = {"family": "llama_alibi", "layers": 2, "hidden": 128}


@pytest.mark.slow
def test_qlora_too(tmp_path: Path) -> None:
    root = workspace(tmp_path / "w", WIDE, **{"train.finetuning_type": "qlora", "train.num_train_epochs": 1})
    one = train(root, tiny.params(), tiny.cpu_plan(1, 2, 4), "float64", run_key="one")
    for name in ("fsdp2", "tp2sp", "pp2", "tp2pp2"):
        other = train(root, tiny.params(), PLANS[name], "float64", run_key=name)
        assert_same(one, other, start_weights(root), loss=1e-9, moved=1e-9)


def tuned_logits(paths: Paths, one: Trained) -> torch.Tensor:
    shutil.rmtree(paths.final, ignore_errors=True)
    shutil.copytree(one.run / "finished" / "final", paths.final)
    with torch.inference_mode():
        return load_tuned(paths)[0](input_ids=IDS).logits


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_13b_is_exported_as_it_was_published(
    alone: dict[tuple[str, Precision], tuple[Path, Trained]],
    method: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root, one = alone[method, "float32"]
    paths, params = Paths(root), read_params(root / "params.yaml")
    expected = tuned_logits(paths, one)
    folder = export(params, paths, tmp_path / "out", merge=True)
    said = capsys.readouterr().err
    assert "whole weights in the layout" in said and "was published in (baichuan)" in said
    missing = ["configuration_baichuan.py", *(["modeling_baichuan.py"] if method == "full" else [])]
    assert f"{', '.join(missing)} did not lie beside the base model" in said
    assert [file.name for file in folder.glob("*.py")] == (
        ["modeling_baichuan.py"] if method == "lora" else []
    )
    weights = load_file(folder / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in weights.items()} == legacy_cases.shapes(KIND)
    lengths = weights["lm_head.weight"].norm(dim=1)
    torch.testing.assert_close(lengths, torch.ones_like(lengths), rtol=0, atol=1e-6)
    for row, ids in enumerate(IDS):
        torch.testing.assert_close(reference(KIND, weights, ids), expected[row], rtol=0, atol=2e-5)
    assert read_object(folder / "config.json") == legacy_cases.CONFIGS[KIND] | {"torch_dtype": "float32"}
    again = Paths(tmp_path / "again")
    ensure_base(params.model.model_copy(update={"name_or_path": str(folder)}), again)
    with torch.inference_mode():
        logits = load_base(again, torch.float32)(input_ids=IDS).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)
    tokenizers = [load_tokenizer(one) for one in (paths, again)]
    tokenizers.append(AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
    for text in legacy_cases.TEXT:
        assert len({str(tokenizer(text)["input_ids"]) for tokenizer in tokenizers}) == 1
    assert len({tokenizer.chat_template for tokenizer in tokenizers}) == 1
    assert ("<reserved_194>" in tokenizers[0].chat_template) == (method == "lora")
    assert (tokenizers[0]("x")["input_ids"][0] == tokenizers[0].bos_token_id) == (method == "lora")
    generation = [read_object(place / "generation_config.json") for place in (paths.base, again.base, folder)]
    assert generation[0] == generation[1] and generation[0].items() <= generation[2].items()
    asked = [[{"role": "user", "content": word}] for word in ("one", "another")]
    assert generate(load_tuned(paths)[0], tokenizers[0], asked, 8) == generate(
        load_base(again, torch.float32), tokenizers[1], asked, 8
    )


def test_an_adapter_of_a_converted_base_says_what_it_fits(
    alone: dict[tuple[str, Precision], tuple[Path, Trained]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root, one = alone["lora", "float32"]
    tuned_logits(Paths(root), one)
    folder = export(read_params(root / "params.yaml"), Paths(root), tmp_path / "out", merge=False)
    assert "its layers have other names and shapes than the published model" in capsys.readouterr().err
    assert (folder / "adapter_model.safetensors").is_file() and not (folder / "tokenizer.model").exists()
