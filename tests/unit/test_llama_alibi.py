"""LLaMA with ALiBi against its description: slopes, padding on either side, cached generation, precisions, parts."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.nn.functional import normalize
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tasks.errors import UserError
from tasks.paths import Paths
from tasks.trainer.base_model import ensure_base
from tasks.trainer.families import layers_of
from tasks.trainer.legacy.publish import check_foldable, write_back
from tasks.trainer.llama_alibi import Alibi, UnitRows, alibi_slopes
from tasks.trainer.loading import load_base
from tasks.trainer.quantize import quantize
from tasks.trainer.recompute import checkpoint_activations
from tests.unit import legacy_cases
from tests.unit.legacy_reference import reference, slopes
from tests.unit.test_legacy_convert import wanted

KIND = "baichuan2-13b"
LENGTHS = (13, 9, 5)
PAD = 0
EXACT: dict[str, Any] = {"rtol": 0, "atol": 1e-5}
CONFIG = {
    "vocab_size": 90,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "initializer_range": 0.2,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    root = tmp_path_factory.mktemp("alibi")
    ensure_base(wanted(legacy_cases.write(root / "model", KIND)), Paths(root / "w"))
    return Paths(root / "w")


@cache
def rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 560, (length,), generator=generator) for length in LENGTHS]


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask) of all rows, each (rows, longest)."""
    longest = max(LENGTHS)
    ids, mask = torch.full((len(LENGTHS), longest), PAD), torch.zeros(len(LENGTHS), longest, dtype=torch.long)
    for number, row in enumerate(rows()):
        place = slice(longest - len(row), None) if side == "left" else slice(len(row))
        ids[number, place], mask[number, place] = row, 1
    return ids, mask


def random_model(**changes: object) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama_alibi", **CONFIG, **changes))


# --- positions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 32, 40, 52, 64])
def test_slopes_are_the_published_ones(heads: int) -> None:
    assert alibi_slopes(heads) == pytest.approx(slopes(heads), rel=1e-12)
    if heads == 40:
        assert alibi_slopes(40)[:2] == pytest.approx((2**-0.25, 2**-0.5))
        assert alibi_slopes(40)[31:34] == pytest.approx((2**-8, 2**-0.125, 2**-0.375))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(base: Paths, side: str, attention: str) -> None:
    weights, model = legacy_cases.random_weights(KIND), load_base(base, torch.float32)
    model.set_attn_implementation(attention)
    ids, mask = padded(side)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits
    for row, there, got in zip(rows(), mask.bool(), logits, strict=True):
        torch.testing.assert_close(got[there], reference(KIND, weights, row), **EXACT)
    assert logits.isfinite().all(), "a place that sees no token at all"


def test_padding_inside_a_row_takes_no_position(base: Paths) -> None:
    row = rows()[0]
    spread = torch.cat([row[:4], torch.full((3,), PAD), row[4:]])
    mask = torch.cat([torch.ones(4), torch.zeros(3), torch.ones(len(row) - 4)]).bool()
    with torch.no_grad():
        logits = load_base(base, torch.float32)(input_ids=spread[None], attention_mask=mask[None]).logits[0]
    expected = reference(KIND, legacy_cases.random_weights(KIND), row)
    torch.testing.assert_close(logits[mask], expected, **EXACT)


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"cache_implementation": "static"}])
def test_generation_equals_the_description_a_token_at_a_time(base: Paths, options: dict[str, object]) -> None:
    weights, model = legacy_cases.random_weights(KIND), load_base(base, torch.float32).eval()
    ids, mask = padded("left")
    new, fixed = 6, {"do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    made = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new, **fixed, **options)
    for row, got in zip(rows(), made, strict=True):
        expected = row
        for _ in range(new):
            expected = torch.cat([expected, reference(KIND, weights, expected)[-1:].argmax(-1)])
        assert got[-len(expected) :].tolist() == expected.tolist()


def test_a_prompt_in_two_pieces_is_one_prompt(base: Paths) -> None:
    model, (ids, mask) = load_base(base, torch.float32).eval(), padded("left")
    with torch.no_grad():
        whole = model(input_ids=ids, attention_mask=mask).logits
        first = model(input_ids=ids[:, :6], attention_mask=mask[:, :6], use_cache=True)
        rest = model(input_ids=ids[:, 6:], attention_mask=mask, past_key_values=first.past_key_values)
    real = mask[:, 6:].bool()
    torch.testing.assert_close(rest.logits[real], whole[:, 6:][real], **EXACT)


def test_masks_and_kernels_that_cannot_hold_it_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be \(rows, tokens\), and is \[1, 1, 4, 4\]"):
        random_model()(input_ids=torch.ones(1, 4, dtype=torch.long), attention_mask=torch.ones(1, 1, 4, 4))
    for kernel in ("flash_attention_2", "flex_attention"):
        with pytest.raises(ValueError, match="does not support"):
            AutoModelForCausalLM.from_config(
                AutoConfig.for_model("llama_alibi", **CONFIG), attn_implementation=kernel
            )


# --- parts and precisions -----------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_have_the_slopes_of_their_heads(ranks: int) -> None:
    asked, mask = torch.arange(5), torch.tensor([[0, 1, 1, 1, 1]])
    whole, parts = Alibi(6)(mask, asked, 5, torch.float64), []
    for rank in range(ranks):
        part = Alibi(6)
        part.keep(rank, ranks)
        parts.append(part(mask, asked, 5, torch.float64))
    assert torch.equal(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_masks_are_rounded_once_and_aligned(dtype: torch.dtype) -> None:
    mask = Alibi(40)(None, torch.arange(300), 300, dtype)
    assert (mask.shape, mask.dtype) == ((1, 40, 300, 300), dtype)
    assert mask.stride()[2] % 16 == 0 and mask.stride()[3] == 1
    distance = torch.arange(300)[None, :] - torch.arange(300)[:, None]
    exact = torch.tensor(slopes(40), dtype=torch.float64)[:, None, None] * distance
    seen = (distance <= 0).expand_as(mask[0])
    error = (mask[0].double() - exact)[seen].abs() / exact[seen].abs().clamp(min=1e-9)
    assert error.max() <= max(torch.finfo(dtype).eps, 1e-12)
    assert (mask[0][~seen] == torch.finfo(dtype).min).all()


@pytest.mark.parametrize("level", ["none", "selective", "full"])
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_with_and_without_recomputing(level: Any, autocast: bool) -> None:
    def gradients(level: Any) -> list[torch.Tensor]:
        model = random_model(unit_head=True)
        checkpoint_activations(model, list(layers_of(model)), level)
        ids, mask = torch.arange(3, 33).view(2, 15), torch.ones(2, 15, dtype=torch.long)
        mask[1, 11:] = 0
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()[mask.bool()]
        loss.log_softmax(-1)[:, 7].mean().backward()
        return [weight.grad for weight in model.parameters()]

    for one, other in zip(gradients("none"), gradients(level), strict=True):
        assert one.norm() > 0 and torch.equal(one, other)


def test_every_attention_projection_is_held_in_four_bits(base: Paths) -> None:
    model = load_base(base, None)
    ids, mask = padded("left")
    with torch.no_grad():
        whole = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
        quantize(model, torch.float32, torch.device("cpu"), torch.device("cpu"))
        packed = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    assert {type(layer.self_attn.k_proj).__name__ for layer in layers_of(model)} == {"NF4Linear"}
    assert type(model.lm_head) is UnitRows
    assert 0.01 < (packed - whole).norm() / whole.norm() < 0.5


def test_a_head_of_unit_rows_learns_as_one_whose_rows_are_brought_to_length_one() -> None:
    torch.manual_seed(1)
    head, states = UnitRows(8, 11, bias=False).double(), torch.randn(4, 8, dtype=torch.float64)
    copy = head.weight.detach().clone().requires_grad_()
    logits = head(states), states @ normalize(copy, dim=1).T
    torch.testing.assert_close(*logits)
    for out in logits:
        out.log_softmax(-1)[:, 2].sum().backward()
    torch.testing.assert_close(head.weight.grad, copy.grad)
    low = head.requires_grad_(False).bfloat16()(states.bfloat16().requires_grad_())
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.double(), logits[0], rtol=0, atol=0.05)


def test_an_adapter_on_a_head_of_unit_rows_is_not_merged() -> None:
    for unit_head, targets in ((True, ["lm_head"]), (True, ["q_proj"]), (False, ["lm_head"])):
        config = LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM")
        model = get_peft_model(random_model(unit_head=unit_head), config)
        if unit_head and targets == ["lm_head"]:
            with pytest.raises(UserError, match=r"cannot be merged; leave out --merge, or train without"):
                check_foldable(model)
        else:
            check_foldable(model)


def test_write_back_keeps_memory_to_a_file_and_numbers_to_the_bit(base: Paths, tmp_path: Path) -> None:
    load_base(base, torch.float32).save_pretrained(tmp_path, max_shard_size="60KB")
    said = write_back(base.base, tmp_path, "m", shard_bytes=70_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 3 and {file.name for file in files} == set(index["weight_map"].values())
    written = {name: value for file in files for name, value in load_file(file).items()}
    published = legacy_cases.random_weights(KIND)
    assert written.keys() == published.keys() == index["weight_map"].keys()
    assert all(
        torch.equal(value, written[name]) for name, value in published.items() if name != "lm_head.weight"
    )
    assert "was published in (baichuan); configuration_baichuan.py, modeling_baichuan.py did not lie" in said
    assert not list(tmp_path.glob(".published-*"))
