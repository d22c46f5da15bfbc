"""Packed rows on one GPU: flash attention over documents beside the block mask, and beside rows that are padded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tasks.data.order import deal
from tasks.data.packing import best_fit
from tasks.trainer import isolation
from tasks.trainer.compiling import compile_layers, why_not
from tasks.trainer.isolation import VARLEN, Isolation, documents_of
from tasks.trainer.loop import restarting
from tasks.trainer.loss import TokenLossSum, learnt_positions
from tests.distributed.ranks import run_ranks

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}
# A quarter of the layers of a model of 1.5 B parameters.
LARGE = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
FAMILIES = {
    "llama": {"model_type": "llama"},
    "qwen3": {"model_type": "qwen3"},
    "mistral": {"model_type": "mistral", "sliding_window": 100},
    "gemma": {"model_type": "gemma", "head_dim": 256},
}


@dataclass(frozen=True)
class Packed:
    """A micro-batch: (rows, tokens) each, on the CPU."""

    ids: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor | None

    def arguments(self) -> dict[str, Any]:
        sent = {"inputs": self.ids, "labels": self.labels, "learnt": learnt_positions(self.labels)}
        told: dict[str, Any] = {name: tensor.to(DEVICE) for name, tensor in sent.items()}
        if self.positions is not None:
            told["documents"] = documents_of(self.positions, torch.device(DEVICE))
        return told


def packed(rows: list[list[int]], vocab: int, seed: int = 0) -> Packed:
    """Rows of documents of so many tokens, filled up to the longest row."""
    width = max(map(sum, rows))
    ids = torch.randint(3, vocab, (len(rows), width), generator=torch.Generator().manual_seed(seed))
    positions = torch.from_numpy(np.stack([restarting(np.array(row), width) for row in rows]))
    labels = torch.where(positions == 0, -100, ids)
    for line, row in enumerate(rows):
        labels[line, sum(row) :] = -100
    return Packed(ids, labels, positions)


def make(config: dict[str, Any], dtype: torch.dtype = torch.float32, louder: float = 4.0) -> PreTrainedModel:
    """Random weights; matrices `louder` than usual, so that attention looks somewhere."""
    torch.manual_seed(1)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "embed" not in name:
                weight.mul_(louder)
    return model.train()


@pytest.fixture
def masked(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, half precision takes the block mask too."""
    return lambda: monkeypatch.setattr(isolation, "why_not_varlen", lambda inner, device: "not wanted")


def step(losses: torch.nn.Module, batch: Packed) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    for weight in losses.parameters():
        weight.grad = None
    loss = losses(**batch.arguments())
    loss.backward()
    return loss.detach(), {
        name.replace("module.", ""): weight.grad for name, weight in losses.named_parameters()
    }


ROWS = [[300, 1, 77, 610, 12], [128, 256, 513, 40], [1000]]


# --- the same numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_varlen_is_the_block_mask(family: str, precision: Any, masked: Callable[[], None]) -> None:
    """Within the rounding that the block mask has itself, beside float32's numbers."""
    model, batch = make(SMALL | FAMILIES[family]), packed(ROWS, 1000)
    found = TokenLossSum(model, model, precision)
    varlen, by_varlen = step(found, batch)
    assert model.config._attn_implementation == VARLEN, "this GPU has flash attention"
    model = make(SMALL | FAMILIES[family])
    exact, gradients = step(TokenLossSum(model, model, "float32"), batch)
    assert model.config._attn_implementation == "sdpa", "float32 has none"
    masked()
    mask, by_mask = step(TokenLossSum(model, model, precision), batch)
    assert abs(varlen - exact) <= 2 * abs(mask - exact) + 1e-3 * exact
    worst = 0.0
    for name, value in gradients.items():
        off, usual = (float((each[name] - value).norm() / value.norm()) for each in (by_varlen, by_mask))
        worst = max(worst, off / max(usual, 1e-3))
        assert off <= 2 * usual + 5e-3, name
    print(
        f"\n{family} {precision}: gradients at most {worst:.2f} times as far off float32's as the block mask's"
    )


def states_of(model: PreTrainedModel, batch: Packed) -> torch.Tensor:
    assert batch.positions is not None
    told = Isolation(model, half=True).arguments(documents_of(batch.positions, torch.device(DEVICE)))
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
        return model(input_ids=batch.ids.to(DEVICE), use_cache=False, **told).logits


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_what_stands_before_changes_not_a_bit(family: str) -> None:
    """huggingface/trl#3067: document 2's logits, whatever document 1 says; and near those of document 2 alone."""
    model, batch = make(SMALL | FAMILIES[family]), packed([[400, 500], [33, 867]], 1000)
    before = states_of(model, batch)
    other = batch.ids.clone()
    other[0, :400], other[1, :33] = other[0, :400].flip(0), other[1, :33].flip(0)
    after = states_of(model, Packed(other, batch.labels, batch.positions))
    assert torch.equal(before[0, 400:], after[0, 400:]) and torch.equal(before[1, 33:], after[1, 33:])
    assert not torch.equal(before[0, :400], after[0, :400])
    alone = states_of(model, Packed(batch.ids[:1, 400:], batch.labels[:1, 400:], torch.arange(500)[None]))
    off = (before[0, 400:] - alone[0]).float().norm() / alone.float().norm()
    assert off < 0.02, off


def test_wrappers_hand_documents_through() -> None:
    """DDP moves what it is called with to its device, and so does FSDP2."""
    run_ranks(1, wrapped)


def wrapped() -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    batch = packed(ROWS, 1000)
    config = SMALL | FAMILIES["llama"]

    def losses() -> TokenLossSum:
        model = make(config)
        return TokenLossSum(model, model, "bfloat16")

    plain, gradients = step(losses(), batch)
    copied, by_ddp = step(DistributedDataParallel(losses(), device_ids=[0]), batch)
    sharded = losses()
    mesh = init_device_mesh("cuda", (1,))
    for layer in sharded.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    split, by_fsdp = step(sharded, batch)
    assert abs(plain - copied) <= 1e-5 * plain and abs(plain - split) <= 1e-5 * plain
    for name, value in gradients.items():  # flash attention's backward pass adds up in no fixed order
        assert (by_ddp[name] - value).norm() <= 5e-3 * value.norm(), name
        assert (by_fsdp[name].to_local() - value).norm() <= 5e-3 * value.norm(), name
    dist.destroy_process_group()


@pytest.mark.skipif(
    torch.cuda.is_available() and why_not(torch.device("cuda", 0)) is not None, reason="no compiler"
)
def test_compiled_layers_take_any_number_of_documents() -> None:
    torch._dynamo.reset()
    counters.clear()
    config = SMALL | FAMILIES["llama"] | {"num_hidden_layers": 2}
    model, plain = make(config), make(config)
    compile_layers(list(model.model.layers))
    fast, slow = TokenLossSum(model, model, "bfloat16"), TokenLossSum(plain, plain, "bfloat16")
    graphs = []
    for seed, rows in enumerate(
        ([[600, 400], [1000]], [[600, 200, 200], [900, 100]], [[513, 400, 87], [1000]])
    ):
        batch = packed(rows, 1000, seed)
        compiled, by_compiled = step(fast, batch)
        loss, gradients = step(slow, batch)
        assert abs(compiled - loss) <= 2e-3 * loss
        for name, value in gradients.items():
            assert (by_compiled[name] - value).norm() <= 0.05 * value.norm(), name
        graphs.append(int(counters["stats"]["unique_graphs"]))
    assert graphs[0] == graphs[-1], f"layers were traced again: {graphs}"


# --- what it brings -----------------------------------------------------------------------------


LONGEST, MICRO, DOCUMENTS = 4096, 2, 256


def long_tail() -> np.ndarray:
    return np.random.RandomState(0).lognormal(5.5, 0.9, DOCUMENTS).clip(16, LONGEST).astype(np.int64)


def in_packs(lengths: np.ndarray) -> list[Packed]:
    packs = best_fit(lengths, LONGEST)
    rows = [lengths[packs.of(number)].tolist() for number in range(len(packs))]
    return [packed(rows[at : at + MICRO], LARGE["vocab_size"], at) for at in range(0, len(rows), MICRO)]


def in_padded_rows(lengths: np.ndarray) -> list[Packed]:
    """Micro-batches of as many rows as a plan could take, whose longest rows decide its memory."""
    found = []
    for at in range(0, len(lengths), 64):  # a step's rows
        for micro in deal(list(range(at, min(at + 64, len(lengths)))), lengths, MICRO, 1, 0):
            batch = packed([[int(lengths[row])] for row in micro.rows], LARGE["vocab_size"], at)
            found.append(Packed(batch.ids, batch.labels, None))
    return found


def measured(name: str, batches: list[Packed], tokens: int) -> tuple[float, float]:
    """(tokens/s of real tokens, peak GiB) of forward and backward passes; all shapes are warm."""
    model = make(LARGE | FAMILIES["llama"], torch.bfloat16, louder=1.0)
    losses = TokenLossSum(model, model, "bfloat16")
    sent = [batch.arguments() for batch in batches]
    for told in sorted(sent, key=lambda told: -told["inputs"].numel())[:2]:
        losses(**told).backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    for told in sent:
        losses(**told).backward()
    torch.cuda.synchronize()
    rate = tokens / (time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(f"{name}: {rate:,.0f} tokens/s, peak {peak:.1f} GiB, {len(batches)} micro-batches")
    return rate, peak


@pytest.fixture
def room() -> Iterator[None]:
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


def test_varlen_is_faster_and_takes_less(masked: Callable[[], None], room: None) -> None:
    lengths = long_tail()
    tokens, packs = int(lengths.sum()), in_packs(lengths)
    print(
        f"\n{DOCUMENTS} documents, {tokens} tokens, {tokens / (len(packs) * MICRO * LONGEST):.1%} of packs' room"
    )
    fast, small = measured("packed, variable-length attention", packs, tokens)
    padded, _ = measured("padded rows", in_padded_rows(lengths), tokens)
    masked()
    slow, large = measured("packed, block mask", packs, tokens)
    print(
        f"variable-length attention: {fast / slow:.2f} x the block mask's speed, {fast / padded:.2f} x padded rows'"
    )
    assert fast > 1.1 * slow
    assert fast > 1.1 * padded
    assert small < large
