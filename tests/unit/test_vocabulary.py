"""A tokenizer with more tokens than its model has rows: the base that every plan trains on has a row for each."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tasks.contracts import FinalManifest
from tasks.errors import UserError
from tasks.params import ModelParams
from tasks.paths import Paths
from tasks.planner.model_spec import model_spec
from tasks.select_strategy import read_config
from tasks.trainer.base_model import ensure_base, published_folder, weights_folder
from tasks.trainer.loading import load_base, read_final
from tests import tiny

NEW = ["<tool>", "</tool>", "<call>", "</call>"]
ROWS = 259


def wanted(folder: Path) -> ModelParams:
    return ModelParams(name_or_path=str(folder), revision=None, trust_remote_code=False)


def add_tokens(folder: Path, tokens: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(tokens)
    tokenizer.save_pretrained(folder)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def published(folder: Path, dtype: torch.dtype = torch.float32, shards: str = "50GB", **how: Any) -> Path:
    """A tiny model whose tokenizer has four tokens that it has no rows for."""
    tiny.write_model(folder, **how)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    model.save_pretrained(folder, max_shard_size=shards)
    add_tokens(folder, NEW)
    return folder


@pytest.mark.parametrize(
    ("how", "tables"),
    [
        ({"family": "llama"}, ["lm_head.weight", "model.embed_tokens.weight"]),
        ({"family": "llama", "tied": True}, ["model.embed_tokens.weight"]),
        (
            {"family": "llama", "dtype": torch.bfloat16, "shards": "20KB"},
            ["lm_head.weight", "model.embed_tokens.weight"],
        ),
        ({"family": "bloom"}, ["lm_head.weight", "transformer.word_embeddings.weight"]),
    ],
    ids=["untied", "tied", "bfloat16-in-shards", "bloom"],
)
def test_every_token_has_a_row(
    how: dict[str, Any], tables: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, paths = published(tmp_path / "m", **how), Paths(tmp_path / "w")
    before, files = stored(folder), {file.name: file.read_bytes() for file in folder.iterdir()}
    ref = ensure_base(wanted(folder), paths, ROWS + 1)
    assert (ref.vocabulary, ref.added_tokens, ref.weights) == (ROWS + 4, 4, "here")
    said = capsys.readouterr().err
    assert f"has 4 token(s) behind the {ROWS} rows of its embedding table (<tool>, </tool>" in said
    after = stored(paths.base)
    assert after.keys() == before.keys()
    changed = sorted(name for name in after if after[name].shape != before[name].shape)
    assert changed == tables
    for name, value in after.items():
        assert value.dtype == before[name].dtype
        assert torch.equal(value[:ROWS] if name in tables else value, before[name])
        if name in tables:
            mean = before[name].double().mean(0).to(value.dtype)
            assert torch.equal(value[ROWS:], mean.expand(4, -1))
    same_answers(folder, paths)
    assert model_spec(read_config(paths.base / "config.json")).vocab == ROWS + 4
    assert ensure_base(wanted(folder), paths) == ensure_base(wanted(folder), paths, ROWS + 3) == ref
    assert "behind" not in capsys.readouterr().err, "made once"
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == files
    assert (weights_folder(ref, paths), published_folder(ref, paths)) == (paths.base, folder)


def same_answers(folder: Path, paths: Paths) -> None:
    """The old tokens' logits are the published ones; a new token is read, and has the mean logit of the others."""
    one, other = AutoModelForCausalLM.from_pretrained(folder), load_base(paths, None)
    ids = torch.arange(3, 35)[None]
    with torch.no_grad():
        left, right = one(input_ids=ids).logits, other(input_ids=ids).logits
        assert torch.equal(left, right[..., :ROWS])
        mean = left.double().mean(-1, keepdim=True)
        assert (right[..., ROWS:] - mean).abs().max() <= 0.01 * left.abs().max()
        (new,) = AutoTokenizer.from_pretrained(paths.base)("<call>")["input_ids"]
        assert new >= ROWS and other(input_ids=torch.tensor([[new]])).logits.isfinite().all()


def test_a_token_that_no_row_holds_needs_none(tmp_path: Path) -> None:
    """A padding or image token behind the tables is no reason to copy a model."""
    folder, paths = published(tmp_path / "m"), Paths(tmp_path / "w")
    plain = ensure_base(wanted(folder), paths)
    assert (plain.vocabulary, plain.added_tokens, plain.weights) == (ROWS, 0, "source")
    assert ensure_base(wanted(folder), paths, ROWS - 1) == plain
    wide = ensure_base(wanted(folder), paths, ROWS)
    assert wide.added_tokens == 4
    assert ensure_base(wanted(folder), paths) == wide
    assert ensure_base(wanted(folder), paths, 5) == plain, "the data changed, and the base with it"


def test_a_tokenizer_that_changed_is_another_base(tmp_path: Path) -> None:
    """Also where the weights stayed as they were."""
    folder, paths = tiny.write_model(tmp_path / "m"), Paths(tmp_path / "w")
    plain = ensure_base(wanted(folder), paths)
    add_tokens(folder, NEW)
    wide = ensure_base(wanted(folder), paths, ROWS)
    assert (plain.vocabulary, wide.vocabulary) == (ROWS, ROWS + 4)
    assert plain.source_hash == wide.source_hash and plain.content_hash != wide.content_hash
    tiny.write_tokenizer(folder)
    assert ensure_base(wanted(folder), paths) == plain
    assert not list(paths.base.glob("*.safetensors"))
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert ensure_base(wanted(folder), paths) == plain, "the same base"
    assert (paths.base / "chat_template.jinja").read_text() == "{{ messages[0]['content'] }}"


def test_what_was_tuned_with_other_rows_names_both_numbers(tmp_path: Path) -> None:
    """unslothai/unsloth#237, huggingface/transformers#40382: loading failed deep inside."""
    folder, paths = published(tmp_path / "m"), Paths(tmp_path / "w")
    FinalManifest(
        run_key="0" * 16,
        content_hash="0" * 64,
        finetuning_type="lora",
        base=ensure_base(wanted(folder), paths, ROWS),
    ).write(paths.final / "manifest.json")
    read_final(paths)
    tiny.write_tokenizer(folder)
    ensure_base(wanted(folder), paths)
    with pytest.raises(UserError, match=f"with {ROWS + 4} rows in its tables, and data/base .* with {ROWS}"):
        read_final(paths)


def test_a_table_that_is_not_found_is_named(tmp_path: Path) -> None:
    folder, paths = published(tmp_path / "m"), Paths(tmp_path / "w")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 250}))
    words = "has 263 tokens and its tables 250 rows, and no rows can be added since lm_head.weight is not"
    with pytest.raises(UserError, match=re.escape(words)):
        ensure_base(wanted(folder), paths, ROWS)
    assert not paths.base.exists()


def test_a_converted_gguf_gets_rows_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the weights lie in data/base already, they are written anew."""
    from tasks.trainer import base_model

    def converted(file: Path, folder: Path) -> None:
        published(folder, shards="20KB")

    monkeypatch.setattr(base_model, "convert_gguf", converted)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    paths = Paths(tmp_path / "w")
    ref = ensure_base(wanted(tmp_path / "model.gguf"), paths, ROWS)
    assert (ref.kind, ref.vocabulary, ref.added_tokens) == ("gguf", ROWS + 4, 4)
    assert load_base(paths, None).get_input_embeddings().weight.shape[0] == ROWS + 4
    assert len(list(paths.base.glob("*.safetensors"))) == 1, "the old files are gone"
    assert ensure_base(wanted(tmp_path / "model.gguf"), paths) == ref
    assert published_folder(ref, paths) == paths.base
