"""Where a model lies that only computes, and that it computes the same there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tasks.trainer.inference import as_base, generate
from tasks.trainer.placement import FILLED, base_of, described, device_map, dispatch, place, weight_bytes
from tasks.trainer.quantize import NF4Linear, quantize
from tests import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = torch.arange(3, 35)[None]
ASKED = [[{"role": "user", "content": text}] for text in ("a", "one two three")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("placement") / "m", layers=4, hidden=64, tied=True)


def adapted(folder: Path, method: str) -> Any:
    """A tied llama of four layers: plain, with an adapter that does something, or with one over NF4."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    if method == "full":
        return model
    cpu = torch.device("cpu")
    if method == "qlora":
        quantize(model, torch.float32, cpu, cpu)
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


# --- which place --------------------------------------------------------------------------------


def gpus(model: Any, *shares: float) -> dict[int, int]:
    """Free memory of GPUs, as shares of what the weights take."""
    return {index: int(share * weight_bytes(model)) for index, share in enumerate(shares)}


@pytest.mark.parametrize("method", ["full", "qlora"])
def test_one_device_as_long_as_the_weights_fit(folder: Path, method: str) -> None:
    model = adapted(folder, method)
    assert device_map(model, {}) is None, "a machine without a GPU"
    assert device_map(model, gpus(model, 1.01 / FILLED, 9)) is None
    assert device_map(model, gpus(model, 0.99 / FILLED, 9)) is not None
    assert place(model) is model and not hasattr(base_of(model), "hf_device_map")


def test_four_bits_count_as_four_bits(folder: Path) -> None:
    plain, packed = adapted(folder, "lora"), adapted(folder, "qlora")
    (freed,) = {
        old.nbytes - new.nbytes
        for old, new in zip(
            (module.weight for module in base_of(plain).modules() if _is_base_linear(module)),
            (module.weight for module in base_of(packed).modules() if isinstance(module, NF4Linear)),
            strict=True,
        )
        if old.shape == (64, 64)
    }
    assert freed == 64 * 64 * 4 - 64 * 64 // 2
    assert weight_bytes(packed) < weight_bytes(plain) / 3


def _is_base_linear(module: Any) -> bool:
    return type(module) is torch.nn.Linear and module.out_features != 259 and 4 not in module.weight.shape


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_layers_are_dealt_out_over_all_gpus_before_host_memory(folder: Path, method: str) -> None:
    model = adapted(folder, method)
    spread = device_map(model, gpus(model, 0.9, 0.9))
    assert spread is not None and set(spread.values()) == {0, 1}
    split = [name for name in spread if re.search(r"layers\.\d+\.", name)]
    assert not split, "a decoder layer lies on one device"
    assert spread["model.embed_tokens"] == 0
    words = described(model, spread)
    assert "more than fits on the first GPU" in words and "on GPU 0, " in words and "on GPU 1" in words
    assert "host memory" not in words


def test_what_finds_no_room_stays_in_host_memory(folder: Path) -> None:
    model = adapted(folder, "lora")
    spread = device_map(model, gpus(model, 0.7))
    assert spread is not None and set(spread.values()) == {0, "cpu"}
    assert "in host memory; what is in host memory crosses" in described(model, spread)
    spread = device_map(model, gpus(model, 0.5, 0.5))
    assert spread is not None and set(spread.values()) == {0, 1, "cpu"}


def test_the_weights_are_counted_once(folder: Path) -> None:
    """The head is the embedding table."""
    model = adapted(folder, "full")
    assert weight_bytes(model) >= sum(weight.nbytes for weight in model.parameters())
    spread = device_map(model, gpus(model, 0.9, 0.9))
    assert spread is not None
    assert f"take {weight_bytes(model) / 2**30:.1f} GiB" in described(model, spread)


# --- the same there -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_a_dispatched_model_computes_the_same(folder: Path, method: str, tmp_path: Path) -> None:
    """Two layers visit the CPU from disk, through the hooks by which others visit a GPU from host memory."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = adapted(folder, method)
    expected, told = logits(model), generate(model, tokenizer, ASKED, 8)
    spread: dict[str, int | str] = {"model.embed_tokens": "cpu", "lm_head": "cpu"}
    spread |= {f"model.layers.{layer}": "disk" if layer in (1, 2) else "cpu" for layer in range(4)}
    spread |= {"model.norm": "cpu", "model.rotary_emb": "cpu"}
    dispatched = dispatch(adapted(folder, method), spread, offload_dir=tmp_path)
    away = {weight.device.type for weight in base_of(dispatched).model.layers[1].parameters()}
    assert away == {"meta"}
    assert torch.equal(logits(dispatched), expected)
    assert generate(dispatched, tokenizer, ASKED, 8) == told
    if method != "full":
        with as_base(model) as one, as_base(dispatched) as other:
            assert torch.equal(logits(one), logits(other))
            assert not torch.equal(logits(one), expected)
