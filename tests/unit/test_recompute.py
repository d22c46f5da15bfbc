"""Activation checkpointing: the same gradients, less kept, and what is dear not computed twice."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tasks.errors import UserError
from tasks.trainer import recompute
from tasks.trainer.recompute import Level, checkpoint_activations

LAYERS, HIDDEN, FFN, QUERY, KEY, HEADS, RANK = 2, 64, 192, 64, 32, 4, 8
ROWS, TOKENS, VOCAB = 2, 40, 64


class Operators(TorchDispatchMode):
    """Counts the operators that run, and knows which tensors made by them are still held."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self._made: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.calls[str(function)] += 1
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)}
        for leaf in tree_leaves(result):
            if _is_tensor(leaf) and leaf.untyped_storage()._cdata not in given:
                storage = leaf.untyped_storage()
                self._made.append((StorageWeakRef(storage), storage.nbytes()))
        return result

    def held_bytes(self) -> int:
        return sum({made.cdata: size for made, size in self._made if not made.expired()}.values())

    def products(self) -> int:
        return sum(self.calls[f"aten.{name}.default"] for name in ("mm", "addmm", "bmm"))


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def make(
    method: str, level: Level, dtype: torch.dtype = torch.float32, family: str = "llama"
) -> tuple[PreTrainedModel, PreTrainedModel | PeftModel]:
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model: PreTrainedModel | PeftModel = base
    if method == "lora":
        model = get_peft_model(base, LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM"))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.05)
    checkpoint_activations(base, layers_of(base), level)
    return base, model.train()


def layers_of(base: PreTrainedModel) -> list[torch.nn.Module]:
    return list(base.get_decoder().layers)


def rows(seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCAB, (ROWS, TOKENS), generator=torch.Generator().manual_seed(seed))


def loss_of(module: torch.nn.Module, ids: torch.Tensor, mixed: bool = False) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        return module(input_ids=ids, use_cache=False).logits.float().logsumexp(-1).sum()


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert found
    return {
        name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in found.items()
    }


def assert_alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, gradient in one.items():
        assert torch.equal(gradient, other[name]), name


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("mixed", [False, True])
def test_gradients_are_those_of_keeping_everything(family: str, method: str, mixed: bool) -> None:
    found = {}
    names = {}
    level: Level
    for level in ("none", "selective", "full"):
        frozen = torch.bfloat16 if mixed and method == "lora" else torch.float32
        _, model = make(method, level, frozen, family)
        names[level] = [name for name, _ in model.named_parameters()]
        loss_of(model, rows(), mixed).backward()
        found[level] = gradients(model)
    assert names["none"] == names["selective"] == names["full"]
    assert_alike(found["none"], found["selective"])
    assert_alike(found["none"], found["full"])


@pytest.mark.parametrize("method", ["full", "lora"])
def test_selective_keeps_products_and_attention_and_no_more(method: str) -> None:
    """The difference to `full` is the sum of these outputs, so it lies between full and none by exactly that."""
    held = {}
    level: Level
    for level in ("none", "selective", "full"):
        _, model = make(method, level, torch.bfloat16 if method == "lora" else torch.float32)
        with Operators() as operators:
            loss = loss_of(model, rows(), mixed=True)
        held[level] = operators.held_bytes()
        del loss
    products = QUERY + 2 * KEY + HIDDEN + 2 * FFN + HIDDEN
    adapters = 7 * RANK if method == "lora" else 0  # outputs of A; those of B are as wide as the base's
    attention = 2 * QUERY + 4 * HEADS  # output, and the float32 logarithm of each row's sum
    assert held["selective"] - held["full"] == LAYERS * ROWS * TOKENS * (
        2 * (products + adapters) + attention
    )
    assert held["none"] > 1.3 * held["selective"]


@pytest.mark.parametrize(("level", "again"), [("none", 0), ("selective", 0), ("full", 6)])
def test_only_full_computes_products_again(level: Level, again: int) -> None:
    """A layer's last product need not be: nothing after it is asked for."""
    counted = {}
    for each in ("none", level):
        _, model = make("full", each)
        loss = loss_of(model, rows())
        with Operators() as backward:
            loss.backward()
        counted[each] = backward.products()
    assert counted[level] - counted["none"] == LAYERS * again


class SumInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class SumAnew(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        kernels = torch.ops._c10d_functional
        return kernels.wait_tensor(kernels.all_reduce(part, "sum", dist.group.WORLD.group_name))

    backward = SumInPlace.backward


@pytest.mark.parametrize(
    ("level", "total", "operator", "again"),
    [
        ("none", SumAnew, "_c10d_functional.all_reduce.default", 0),
        ("selective", SumAnew, "_c10d_functional.all_reduce.default", 0),
        ("full", SumAnew, "_c10d_functional.all_reduce.default", 1),
        ("selective", SumInPlace, "c10d.allreduce_.default", 1),
        ("full", SumInPlace, "c10d.allreduce_.default", 1),
    ],
)
def test_sums_over_ranks_inside_a_layer(
    group: dist.ProcessGroup, level: Level, total: Any, operator: str, again: int
) -> None:
    """A sum that is a new tensor is kept by `selective`; one in place runs again, on every rank alike: that after
    attention, for the one after the MLP comes when all that is asked for has been computed.
    """
    base, model = make("full", level)
    for layer in layers_of(base):
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
            module.register_forward_hook(lambda module, args, output: total.apply(output))
    loss = loss_of(model, rows())
    with Operators() as backward:
        loss.backward()
    assert backward.calls[operator] == LAYERS * again
    _, plain = make("full", "none")
    loss_of(plain, rows()).backward()
    assert_alike(gradients(plain), gradients(model))


@pytest.mark.parametrize("level", ["selective", "full"])
def test_under_data_parallelism(group: dist.ProcessGroup, level: Level) -> None:
    _, plain = make("lora", "none")
    loss_of(plain, rows()).backward()
    _, model = make("lora", level)
    loss_of(DistributedDataParallel(model, broadcast_buffers=False), rows()).backward()
    assert_alike(gradients(plain), gradients(model))

    base, model = make("lora", level)
    mesh = init_device_mesh("cpu", (1,))
    for layer in layers_of(base):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss_of(model, rows()).backward()
    assert_alike(gradients(plain), gradients(model))


def two_micro_batches_at_once(level: Level) -> dict[str, torch.Tensor]:
    """Both go forward under one autocast, as a pipeline's may, before one goes backward."""
    _, model = make("full", level)
    with torch.autocast("cpu", torch.bfloat16):
        losses = [loss_of(model, rows(seed), mixed=True) for seed in (1, 2)]
    for loss in losses:
        loss.backward()
    return gradients(model)


def test_casts_are_computed_again_whoever_made_them_first(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, selective = two_micro_batches_at_once("none"), two_micro_batches_at_once("selective")
    for name, gradient in plain.items():
        torch.testing.assert_close(
            selective[name], gradient, rtol=2e-2, atol=2e-2 * float(gradient.abs().max())
        )
    if torch.__version__ < (2, 13):
        return  # what is computed again was not yet held against what was computed
    monkeypatch.setattr(recompute, "_casts_not_cached", contextlib.nullcontext)
    with pytest.raises(RuntimeError, match="not found in storage"):
        two_micro_batches_at_once("selective")


@pytest.mark.parametrize("level", ["selective", "full"])
def test_nothing_is_set_up_where_no_gradient_is_wanted(level: Level) -> None:
    _, plain = make("full", "none")
    _, model = make("full", level)
    with torch.no_grad():
        assert torch.equal(loss_of(model, rows()), loss_of(plain, rows()))


def test_unknown_layers_are_refused() -> None:
    base, _ = make("full", "none")
    checkpoint_activations(base, [], "none")
    with pytest.raises(UserError, match=r"activation_checkpointing=selective.*LlamaForCausalLM.*=none"):
        checkpoint_activations(base, [], "selective")
