"""A model that is spread over GPUs, or partly left in host memory, computes as on one GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tasks.trainer import placement
from tasks.trainer.inference import as_base, generate
from tests import tiny
from tests.unit.test_placement import ASKED, IDS, adapted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("placement") / "m", layers=4, hidden=64, tied=True)


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("shares", [(0.7,), (0.9, 0.9), (0.5, 0.5)], ids=str)
def test_a_spread_model_computes_as_on_one_gpu(
    folder: Path, method: str, shares: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.device_count() < len(shares):
        pytest.skip("needs two CUDA devices")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    one = placement.place(adapted(folder, method))
    free = {
        index: int(share * placement.weight_bytes(one) / placement.FILLED)
        for index, share in enumerate(shares)
    }
    monkeypatch.setattr(placement, "free_memory", lambda: free)
    spread = placement.place(adapted(folder, method))
    assert len(set(placement.base_of(spread).hf_device_map.values())) > 1
    same(one, spread)
    assert generate(spread, tokenizer, ASKED, 8) == generate(one, tokenizer, ASKED, 8)
    if method != "full":
        with as_base(one) as left, as_base(spread) as right:
            same(left, right)
        same(one, spread)


def same(one: Any, other: Any) -> None:
    with torch.no_grad():
        left, right = (model(input_ids=IDS.to(placement.device())).logits for model in (one, other))
    assert left.device == right.device
    assert (left - right).abs().max() <= 1e-5 * left.abs().max()


def test_a_freed_model_leaves_its_memory(folder: Path) -> None:
    before = placement.free_memory()[0]
    model = placement.place(adapted(folder, "lora"))
    del model
    assert placement.free_memory()[0] >= before - 2**21
