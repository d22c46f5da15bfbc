"""What cannot be converted is refused by name, and nothing is left."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch

from tasks.errors import UserError
from tasks.paths import Paths
from tasks.trainer.base_model import ensure_base
from tests.unit import legacy_cases
from tests.unit.test_legacy_convert import change, wanted


def refusal(folder: Path, tmp_path: Path) -> str:
    paths = Paths(tmp_path / "w")
    with pytest.raises(UserError) as caught:
        ensure_base(wanted(folder), paths)
    assert not paths.base.exists() and not list((tmp_path / "w").rglob("*.safetensors")), "something is left"
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "keys", "said"),
    [
        ("qwen", {"no_bias": False}, "no_bias is false and cannot be converted (a bias outside c_attn"),
        ("qwen", {"rotary_pct": 0.5}, "rotary_pct is 0.5 and cannot be converted"),
        ("qwen", {"visual": {"width": 8}}, "visual is"),
        ("qwen", {"quantization_config": {"bits": 4}}, "its weights are quantised"),
        ("qwen", {"kv_channels": 16}, "kv_channels is 16 and 4 heads of it must make hidden_size=32"),
        ("qwen", {"hidden_size": "many"}, 'hidden_size is "many" and must be a positive whole number'),
        ("baichuan", {"architectures": ["Other"]}, "vocab_size is 600 and neither Baichuan's 64000 nor"),
        ("chatglm3", {"add_bias_linear": True}, "add_bias_linear is true and cannot be converted"),
        ("chatglm3", {"multi_query_attention": False}, "heads with keys of their own"),
        ("chatglm3", {"quantization_bit": 4}, "quantization_bit is 4"),
        ("chatglm3", {"pre_seq_len": 128}, "pre_seq_len is 128 and cannot be converted (a tuned prefix)"),
        ("chatglm3", {"inner_hidden_size": 16384}, "it belongs to the first ChatGLM-6B"),
        ("chatglm2", {"rope_ratio": 16}, "rope_ratio is 16 and means something else in ChatGLM2"),
        ("chatglm3", {"_name_or_path": "somewhere"}, "tells ChatGLM2 from ChatGLM3"),
        ("chatglm3", {"padded_vocab_size": 500}, "[640, 32] where config.json makes it [500, 32]"),
        ("qwen", {"num_hidden_layers": 1}, "transformer.h.1.attn.c_attn.bias [96]"),
        ("qwen", {"num_hidden_layers": 3}, "lacks 12 tensors (model.layers.2.input_layernorm.weight"),
        (
            "qwen",
            {"intermediate_size": 52},
            "mlp.c_proj.weight is [32, 24] where config.json makes it [32, 26]",
        ),
    ],
)
def test_what_has_no_counterpart_is_named(
    kind: str, keys: dict[str, object], said: str, tmp_path: Path
) -> None:
    folder = legacy_cases.write(tmp_path / "model", kind)
    change(folder, **keys)
    assert said in refusal(folder, tmp_path)


def test_broken_checkpoints_are_named(tmp_path: Path) -> None:
    weights = legacy_cases.random_weights("qwen")
    folder = legacy_cases.write(tmp_path / "a", "qwen", weights | {"transformer.h.0.adapter": torch.ones(2)})
    assert "has 1 tensors that its layout does not (transformer.h.0.adapter [2])" in refusal(folder, tmp_path)
    packed = weights | {"transformer.h.0.mlp.w1.weight": torch.ones(24, 32, dtype=torch.int8)}
    folder = legacy_cases.write(tmp_path / "b", "qwen", packed, suffix="bin")
    assert "transformer.h.0.mlp.w1.weight is int8, so quantised or packed" in refusal(folder, tmp_path)
    folder = legacy_cases.write(tmp_path / "c", "qwen", files=2, suffix="bin")
    (folder / "pytorch_model-00002-of-00002.bin").unlink()
    assert "lacks pytorch_model-00002-of-00002.bin, which pytorch_model.bin.index.json" in refusal(
        folder, tmp_path
    )
    folder = legacy_cases.write(tmp_path / "d", "qwen", files=2)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "copy.safetensors").write_bytes((folder / "model-00001-of-00002.safetensors").read_bytes())
    assert "is in two of its files" in refusal(folder, tmp_path)


class Trap:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (os.environ["TRAP"],)


def test_a_bin_that_would_run_code_runs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAP", str(tmp_path / "sprung"))
    folder = legacy_cases.write(tmp_path / "model", "qwen", suffix="bin")
    torch.save({"transformer.wte.weight": Trap()}, folder / "pytorch_model.bin", pickle_module=pickle)
    assert "cannot be read as tensors alone" in refusal(folder, tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_nothing_is_left_when_it_ends_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.trainer.legacy import checkpoint

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    folder = legacy_cases.write(tmp_path / "model", "qwen")
    with pytest.raises(OSError, match="No space left"):
        ensure_base(wanted(folder), Paths(tmp_path / "w"))
    assert not list((tmp_path / "w").rglob("*")) or not (tmp_path / "w" / "data" / "base").exists()
    assert not list((tmp_path / "w").rglob(".base.new"))
