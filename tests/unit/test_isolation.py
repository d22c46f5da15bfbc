"""Packed documents are kept apart: logits, losses and gradients are those of each alone, in every family."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tasks.planner.capabilities import TRAINABLE_NOW
from tasks.planner.model_spec import model_spec
from tasks.trainer import isolation
from tasks.trainer.compiling import compile_layers, why_not
from tasks.trainer.isolation import Documents, Isolation, documents_of
from tasks.trainer.loss import TokenLossSum, learnt_positions
from tasks.trainer.recompute import checkpoint_activations
from tests.unit.model_cases import VARIANTS
from tests.varlen import use_varlen_on_cpu

CPU = torch.device("cpu")
LENGTHS = ((9, 1, 14, 6), (20, 3, 7))
DEFAULTS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# A window that documents are longer than.
WINDOWED = [
    {"model_type": "mistral", **DEFAULTS, "sliding_window": 5},
    {
        "model_type": "qwen2",
        **DEFAULTS,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    {"model_type": "phi", **DEFAULTS},
]
# Phi's norm of query and key does not take the width of the planner's case. Falcon does it in newer transformers alone.
TEXT = [
    case
    for case in VARIANTS
    if not case["model_type"].startswith(("llava", "falcon")) and not case.get("qk_layernorm")
]
QUICK = {"llama", "mistral", "qwen2", "glm", "bloom", "mpt", "phi"}


def cases() -> Iterator[Any]:
    """The first of each family; of a few families quickly."""
    seen: set[str] = set()
    for config in (*WINDOWED, *TEXT):
        family = config["model_type"]
        marks = () if family in QUICK - seen else pytest.mark.slow
        seen.add(family)
        yield pytest.param(config, id=family, marks=marks)


def make(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Weights large enough that attention looks somewhere."""
    torch.manual_seed(3)
    whole = AutoConfig.for_model(**config)
    model = AutoModelForCausalLM.from_config(whole).to(dtype).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "embed" not in name:
                weight.mul_(8)
    return model


def drawn(seed: int = 0) -> list[list[torch.Tensor]]:
    """Documents of two rows of equal length."""
    draw = torch.Generator().manual_seed(seed)
    return [[torch.randint(3, 100, (length,), generator=draw) for length in row] for row in LENGTHS]


def packed(rows: list[list[torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(input_ids, positions)"""
    ids = torch.stack([torch.cat(row) for row in rows])
    return ids, torch.stack([torch.cat([torch.arange(len(part)) for part in row]) for row in rows])


def logits(model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    told = isolation_of(model).arguments(None if positions is None else documents_of(positions, CPU))
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False, **told).logits


def isolation_of(model: PreTrainedModel) -> Isolation:
    """One a model: it may have put hooks into it."""
    if not hasattr(model, "isolation_of_test"):
        object.__setattr__(model, "isolation_of_test", Isolation(model, half=False))
    found: Isolation = model.isolation_of_test
    return found


def apart(
    model: PreTrainedModel, rows: list[list[torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of packed documents, of each alone, and of rows that are taken for one document."""
    ids, positions = packed(rows)
    together = logits(model, ids, positions)
    leaky = logits(model, ids, None)
    alone = torch.stack([torch.cat([logits(model, part[None], None)[0] for part in row]) for row in rows])
    return together, alone, leaky


def known(config: dict[str, Any]) -> bool:
    return TRAINABLE_NOW.isolates(model_spec(AutoConfig.for_model(**config).to_dict()))


@pytest.mark.parametrize("config", cases())
def test_logits_are_those_of_each_document_alone(config: dict[str, Any]) -> None:
    """huggingface/trl#3067, in each family that may pack; the others are those that the planner refuses."""
    together, alone, leaky = apart(make(config), drawn())
    assert (leaky - alone).abs().max() > 1e-3, "without borders documents see each other"
    same = bool((together - alone).abs().max() < 1e-5 * alone.abs().max().clamp(min=1))
    assert same == known(config)


def test_two_documents_of_ten_tokens() -> None:
    """huggingface/trl#3067's own input."""
    model = make({"model_type": "llama", **DEFAULTS}, torch.float64)
    one, two = torch.randint(3, 100, (2, 10), generator=torch.Generator().manual_seed(4))
    together, alone, leaky = apart(model, [[one, two]])
    assert (together - alone).abs().max() < 1e-12
    assert (leaky - alone)[:, 10:].abs().max() > 1e-2
    other = apart(model, [[one.flip(0), two]])[0]
    assert torch.equal(other[:, 10:], together[:, 10:]), "what stands before changes nothing, not a bit"


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_in_float64_nothing_but_rounding_is_left(family: str) -> None:
    config = next(case for case in WINDOWED if case["model_type"] == family)
    together, alone, _ = apart(make(config, torch.float64), drawn())
    assert (together - alone).abs().max() < 1e-12


def test_alibi_keeps_its_digits_at_the_end_of_a_long_row() -> None:
    """In bfloat16 a bias of positions in the row would be off by whole tokens there."""
    model = make(
        {"model_type": "bloom", "n_embed": 32, "n_layer": 2, "n_head": 4, "vocab_size": 101}, torch.bfloat16
    )
    draw = torch.Generator().manual_seed(5)
    rows = [[torch.randint(3, 100, (length,), generator=draw) for length in (600, 40)]]
    together, alone, leaky = (found[:, 600:].float() for found in apart(model, rows))
    assert (together - alone).abs().max() < 0.02 * alone.abs().max()
    assert (leaky - alone).abs().max() > 0.1 * alone.abs().max()


# --- as the engine calls it ---------------------------------------------------------------------


def loss_of(
    model: PreTrainedModel, ids: torch.Tensor, labels: torch.Tensor, documents: Documents | None
) -> torch.Tensor:
    return TokenLossSum(model, model, "float64")(ids, labels, learnt_positions(labels), documents)


@pytest.mark.parametrize("plain", [True, False])
def test_gradients_are_the_sum_of_those_alone(plain: bool) -> None:
    config = {"model_type": "llama" if plain else "gpt_neox", **DEFAULTS}
    model, rows = make(config, torch.float64), drawn(1)
    ids, positions = packed(rows)
    labels = torch.where(positions == 0, -100, ids)
    loss_of(model, ids, labels, documents_of(positions, CPU)).backward()
    together = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    for part in (part for row in rows for part in row):
        loss_of(model, part[None], part[None], None).backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None and together[name] is not None, name
        assert (together[name] - weight.grad).norm() <= 1e-9 * weight.grad.norm() + 1e-12, name


def test_where_documents_lie() -> None:
    found = documents_of(torch.tensor([[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 0]]), CPU)
    assert found.borders.tolist() == [0, 3, 4, 6, 11, 12]
    assert found.longest == 8
    assert documents_of(torch.zeros(1, 3, dtype=torch.int64), CPU).longest == 1
    assert documents_of(torch.arange(8)[None], CPU).longest == 8


# --- variable-length attention, on the CPU through the operator's schema --------------------------


def half(
    config: dict[str, Any], level: str = "none", compiled: bool = False
) -> tuple[PreTrainedModel, TokenLossSum]:
    model = make(config)
    layers = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    checkpoint_activations(model, layers, level)  # type: ignore[arg-type]
    if compiled:
        compile_layers(layers)
    return model, TokenLossSum(model, model, "bfloat16")


def step(
    model: PreTrainedModel, losses: TokenLossSum, seed: int = 0
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids, positions = packed(drawn(seed))
    labels = torch.where(positions == 0, -100, ids)
    model.zero_grad(set_to_none=True)
    loss = losses(ids, labels, learnt_positions(labels), documents_of(positions, CPU))
    loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.parametrize(
    ("config", "level"),
    [
        pytest.param({"model_type": "llama", **DEFAULTS}, "none", id="llama"),
        pytest.param(WINDOWED[0], "selective", id="mistral", marks=pytest.mark.slow),
        pytest.param(WINDOWED[1], "full", id="qwen2", marks=pytest.mark.slow),
    ],
)
def test_varlen_attention_is_that_of_the_block_mask(
    config: dict[str, Any], level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To bfloat16's rounding, whose share is seen beside float32's numbers; windows included."""
    exact, gradients = step(*half_of(make(config), "float32"))
    masked, by_mask = step(*half(config, level))
    use_varlen_on_cpu(monkeypatch)
    model, losses = half(config, level)
    varlen, found = step(model, losses)
    assert model.config._attn_implementation == isolation.VARLEN
    assert abs(varlen - exact) <= 2 * abs(masked - exact) + 2e-3 * exact
    for name, value in gradients.items():
        off = (found[name] - value).norm()
        assert off <= 2 * (by_mask[name] - value).norm() + 0.02 * value.norm(), name


def half_of(model: PreTrainedModel, precision: str) -> tuple[PreTrainedModel, TokenLossSum]:
    return model, TokenLossSum(model, model, precision)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.skipif(why_not(CPU) is not None, reason="no compiler")
def test_compiled_layers_need_no_graph_for_each_number_of_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    use_varlen_on_cpu(monkeypatch)
    torch._dynamo.reset()
    counters.clear()
    config = {"model_type": "llama", **DEFAULTS, "num_hidden_layers": 3}
    _, losses = half(config, compiled=True)
    plain = half(config)
    graphs = []
    for seed in range(4):
        rows = [[torch.randint(3, 100, (n,)) for n in cut] for cut in CUTS[seed]]
        ids, positions = packed(rows)
        labels = torch.where(positions == 0, -100, ids)
        told = (ids, labels, learnt_positions(labels), documents_of(positions, CPU))
        loss = losses(*told)
        loss.backward()
        assert abs(loss - plain[1](*told)) <= 5e-3 * abs(loss)
        graphs.append(int(counters["stats"]["unique_graphs"]))
    assert graphs[0] == graphs[-1], "longest documents of one power of two, one width: one graph serves all"


CUTS = (
    ((20, 12), (31, 1)),
    ((17, 9, 6), (20, 12)),
    ((18, 1, 1, 12), (30, 2)),
    ((32,), (5, 4, 3, 20)),
)
