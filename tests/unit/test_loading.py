"""A base model read box by box: the same as the one transformers loads, and every fault of its files is a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tasks.errors import UserError
from tasks.params import ModelParams
from tasks.paths import Paths
from tasks.trainer import filling
from tasks.trainer.base_model import ensure_base
from tasks.trainer.file_weights import FileWeights
from tasks.trainer.filling import EmptyStage, fill
from tasks.trainer.loading import load_base, meta_model, open_base
from tasks.trainer.parallelize import parallelize
from tasks.trainer.weights import LoadedWeights, MetaModel, RandomWeights, meta_of
from tests import tiny

CPU = torch.device("cpu")
FULL = tiny.params(**{"train.finetuning_type": "full"}).train
GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32}


def base(root: Path, folder: Path, trusted: bool = False) -> Paths:
    model = ModelParams(name_or_path=str(folder), revision=None, trust_remote_code=trusted)
    ensure_base(model, Paths(root))
    return Paths(root)


def filled(given: MetaModel) -> nn.Module:
    parts = parallelize(given, FULL, tiny.cpu_plan(), "float32", 0)
    return parts.model


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Tensors of the one file, by names with __ for dots; None takes one away."""
    file = folder / "model.safetensors"
    held = load_file(file)
    for key, value in tensors.items():
        name = key.replace("__", ".")
        if value is None:
            del held[name]
        else:
            held[name] = value
    save_file(held, file, metadata={"format": "pt"})


def add_keys(file: Path, **keys: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def assert_equal_models(mine: nn.Module, expected: nn.Module) -> None:
    for kind in ("named_parameters", "named_buffers"):
        one, other = (dict(getattr(model, kind)(remove_duplicate=False)) for model in (mine, expected))
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            assert tensor.dtype == other[name].dtype, name
            assert torch.equal(tensor, other[name]), name
    assert mine.config.to_dict() == expected.config.to_dict()
    assert mine.config.name_or_path == expected.config.name_or_path
    assert mine.generation_config.to_dict() == expected.generation_config.to_dict()


# --- the same model -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "stored", "dtype"),
    [
        ("llama", torch.float32, torch.float64),
        ("qwen3", torch.bfloat16, None),
        ("gemma", torch.float16, None),  # has a buffer of its own beside the rotation's
        ("bloom", torch.float16, torch.float32),
        ("gpt2", torch.float32, torch.float32),  # no linear layers, and persistent buffers in old files
    ],
)
def test_it_is_what_transformers_loads(
    family: str, stored: torch.dtype, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    shape = GPT2 if family == "gpt2" else {}
    if shape:
        AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **shape)).save_pretrained(
            tmp_path / "m"
        )
        tiny.write_tokenizer(tmp_path / "m")
    else:
        tiny.write_model(tmp_path / "m", family=family, tied=family in ("gemma", "bloom"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=stored)
    model.save_pretrained(tmp_path / "m", max_shard_size="20KB" if family == "qwen3" else "1GB")
    if family == "gemma":  # what config.json does not say is looked up in the file
        add_keys(tmp_path / "m" / "config.json", dtype=None)
        (tmp_path / "m" / "generation_config.json").unlink()
    if family == "qwen3":
        (tmp_path / "m" / "model.safetensors").unlink()
        add_keys(tmp_path / "m" / "generation_config.json", do_sample=True, top_k=7)
    paths = base(tmp_path, tmp_path / "m")
    opened = open_base(paths, dtype)
    assert isinstance(opened.weights, FileWeights)
    assert all(weight.is_meta for weight in opened.model.parameters())
    assert_equal_models(filled(opened).eval(), load_base(paths, dtype).eval())


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_names_with_and_without_the_prefix(prefix: str, tmp_path: Path) -> None:
    """BLOOM's files at the hub are those of the model without its head."""
    folder = tiny.write_model(tmp_path / "m", family="bloom", tied=True)
    file = folder / "model.safetensors"
    tensors = {prefix + name.removeprefix("transformer."): value for name, value in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    paths = base(tmp_path, folder)
    model = filled(open_base(paths, torch.float32))
    assert_equal_models(model, load_base(paths, torch.float32))
    assert model.lm_head.weight is model.transformer.word_embeddings.weight


def test_a_tied_pair_that_is_in_the_files_twice_is_one(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "m", tied=True)
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change(folder, lm_head__weight=table.clone())
    opened = open_base(base(tmp_path, folder), torch.float32)
    assert isinstance(opened.weights, FileWeights)
    model = filled(opened)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, table)


def test_random_weights_are_one_model_however_they_are_asked_for() -> None:
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    model = meta_model(config, torch.float32)
    weights = RandomWeights(model, 3)

    def read(name: str, offsets: tuple[int, ...], *sizes: int) -> torch.Tensor:
        into = torch.empty(sizes)
        weights.read(name, offsets, into)
        return into

    whole = read("model.layers.0.mlp.up_proj.weight", (0, 0), 64, 32)
    assert torch.equal(read("model.layers.0.mlp.up_proj.weight", (16, 8), 20, 4), whole[16:36, 8:12])
    assert 0.8 * 0.02 < whole.std() < 1.2 * 0.02
    assert torch.equal(
        read("lm_head.weight", (0, 0), 96, 32), read("model.embed_tokens.weight", (0, 0), 96, 32)
    )
    assert torch.equal(read("model.norm.weight", (0,), 32), torch.ones(32))
    assert torch.equal(whole, whole.bfloat16().float())


# --- models that are loaded whole ---------------------------------------------------------------


def test_what_cannot_be_read_so_is_loaded_whole_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Experts are one tensor in the model and many in the files; a pair that differs is not tied."""
    folders = {"experts": tmp_path / "experts", "pair": tmp_path / "pair"}
    config = AutoConfig.for_model(
        "mixtral",
        vocab_size=259,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folders["experts"])
    tiny.write_tokenizer(folders["experts"])
    tiny.write_model(folders["pair"], tied=True)
    change(folders["pair"], lm_head__weight=torch.ones(259, 32))
    for name, reason in (
        ("experts", "transformers makes the tensors of MixtralForCausalLM from others while it loads them"),
        ("pair", "are one by its config.json and differ in its files"),
    ):
        (tmp_path / name[0]).mkdir()
        paths = base(tmp_path / name[0], folders[name])
        opened = open_base(paths, torch.float32)
        assert reason in capsys.readouterr().err
        model = filled(opened)
        assert_equal_models(model, load_base(paths, torch.float32))
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_memory_is_given_up_as_it_is_read(tmp_path: Path) -> None:
    tiny.write_model(tmp_path / "m")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    given = meta_of(model)
    assert "model.norm.weight" in given.weights
    filled(given)
    assert not any(name in given.weights for name in model.state_dict())


# --- faults -------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.write_model(tmp_path / "m")


def refused(folder: Path, sentence: str) -> None:
    model = meta_model(LlamaConfig.from_pretrained(folder), torch.float32)
    with pytest.raises(UserError, match=sentence):
        FileWeights(folder, model)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    change(folder, model__norm__weight=None)
    refused(folder, r"model\.safetensors has no model\.norm\.weight, which config\.json asks for; fetch")
    change(folder, lm_head__weight=None)
    refused(folder, r"has no lm_head\.weight and 1 more of its tensors|model\.norm\.weight and 1 more")


def test_another_shape_is_named(folder: Path) -> None:
    change(folder, model__norm__weight=torch.ones(31))
    refused(folder, r"model\.safetensors: model\.norm\.weight is \[31\] where config\.json makes it \[32\]")


@pytest.fixture
def many(folder: Path) -> Path:
    """The same model in several files."""
    LlamaForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    return folder


def file_of(folder: Path, tensor: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][tensor]


@pytest.mark.parametrize("left", [0, 4, 40, -1])
def test_a_file_that_ends_early_is_named(left: int, many: Path) -> None:
    file = file_of(many, "model.norm.weight")
    file.write_bytes(file.read_bytes()[:left])
    refused(many, rf"{file.name}, which should have .*\.weight, cannot be read \(.*\); fetch it anew")


def test_a_file_that_is_not_there_is_named(many: Path) -> None:
    file = file_of(many, "model.norm.weight")
    file.unlink()
    refused(many, rf"{file.name}, which should have .*\.weight, cannot be read")


def test_an_index_that_is_wrong_is_named(many: Path) -> None:
    index = many / "model.safetensors.index.json"
    named = json.loads(index.read_text())
    named["weight_map"]["model.norm.weight"] = file_of(many, "lm_head.weight").name
    index.write_text(json.dumps(named))
    refused(many, r"does not have model\.norm\.weight .*which model\.safetensors\.index\.json says")
    for text in ("{", "[]", '{"weight_map": 3}'):
        index.write_text(text)
        refused(many, r"index\.json does not say which file has which tensor")


def test_nothing_is_left_without_numbers(folder: Path) -> None:
    model = meta_model(LlamaConfig.from_pretrained(folder), torch.float32)
    model.model.register_buffer("forgotten", torch.empty(3, device="meta"))
    with pytest.raises(RuntimeError, match=r"model\.forgotten would be left without numbers"):
        fill([EmptyStage(model, model, None)], FileWeights(folder, model), LoadedWeights({}), CPU)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_large_model_shows_its_bytes_on_one_rank(
    rank: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RANK", rank)
    opened = open_base(base(tmp_path, folder), torch.float32)
    filled(opened)
    assert "loading weights" not in capsys.readouterr().err, "small ones are there at once"
    monkeypatch.setattr(filling, "LARGE", 1)
    filled(open_base(Paths(tmp_path), torch.float32))
    said = capsys.readouterr().err
    assert ("loading weights: 100%" in said) == (rank == "0")
    assert rank == "1" or f"{sum(w.numel() for w in opened.model.parameters()) * 4 / 1e3:.0f}k/" in said
