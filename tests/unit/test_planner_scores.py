"""What attention without a flash kernel keeps, against what torch really keeps."""

from __future__ import annotations

import pytest

import tasks.trainer.llama_alibi  # noqa: F401 (which makes the class known to transformers)
from tasks.planner.activations import layer_bytes, mask_bytes
from tasks.planner.memory import memory
from tasks.planner.model_spec import model_spec
from tasks.planner.workload import ELASTANE
from tests.unit.test_planner_memory import SHAPES, bytes_kept, plan_of, work


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_alibi_is_one_mask_for_all_layers(precision):
    shapes = {**SHAPES, "num_key_value_heads": 4, "num_hidden_layers": 2}
    alibi, llama = (model_spec({"model_type": name, **shapes}) for name in ("llama_alibi", "llama"))
    plan = plan_of(accumulation=1)

    def kept(model_type: str, tokens: int) -> tuple[int, int]:
        """Bytes (once, of each layer)."""
        one, two = (
            bytes_kept(model_type, "full", precision, layers, tokens, key_value_heads=4) for layers in (1, 2)
        )
        return 2 * one - two, two - one

    # Rows are half as long as the tokens. What grows with the row alone cancels in the bend: LLaMA's angles.
    once, layer = zip(*(kept("llama_alibi", tokens) for tokens in (128, 192, 256)), strict=True)
    per_pair = mask_bytes(alibi, plan, work("full", precision, longest=1), ELASTANE)
    assert once[0] - 2 * once[1] + once[2] == per_pair * (64**2 - 2 * 96**2 + 128**2)
    assert layer[0] == kept("llama", 128)[1]
    terms, none = (memory(spec, plan, work("full", precision, longest=512)) for spec in (alibi, llama))
    assert terms["activations"] - none["activations"] == per_pair * 512**2


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_bloom_keeps_its_scores(precision):
    config = {"model_type": "bloom", "hidden_size": 128, "n_head": 4, "vocab_size": 64}
    one, plan = model_spec({**config, "n_layer": 1}), plan_of(device="cpu")

    def layer(tokens: int) -> int:
        two, one = (bytes_kept("bloom", "full", precision, layers, tokens) for layers in (2, 1))
        return two - one

    def predicted(longest: int) -> float:
        return 2 * longest * layer_bytes(one, plan, work("full", precision, longest), ELASTANE)[0]

    real = layer(512) - 2 * layer(384) + layer(256)
    assert predicted(256) - 2 * predicted(192) + predicted(128) == real > 0
