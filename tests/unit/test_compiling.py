"""Compiled layers and loss: the same numbers, few graphs, and a sentence where it cannot be."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

from tasks.errors import UserError
from tasks.trainer import collectives, compiling
from tasks.trainer.compiling import compile_layers, compiled_token_loss, why_not
from tasks.trainer.loss import token_loss
from tasks.trainer.recompute import Level
from tests.unit.test_recompute import HIDDEN, gradients, layers_of, make

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An empty cache of kernels, and no pool of processes to compile the few that there are."""
    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(compile_threads=1):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        yield


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing compiled in an earlier test is found."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def through(layers: list[nn.Module], rotary: nn.Module, shape: tuple[int, int], mixed: bool) -> torch.Tensor:
    """Random hidden states through decoder layers, called as transformers calls them."""
    states = torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(shape[1])).requires_grad_()
    positions = torch.arange(shape[1])[None]
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        embeddings = rotary(states, positions)
        for layer in layers:
            states = layer(
                states, attention_mask=None, position_ids=positions, position_embeddings=embeddings
            )
    return states.float()


@dataclass
class Trial:
    """A model and its layers as a function of shape."""

    model: nn.Module
    run: Callable[[tuple[int, int]], torch.Tensor]


def plain_and_compiled(method: str, level: Level, mixed: bool) -> tuple[Trial, Trial]:
    found = []
    for compiled in (False, True):
        frozen = torch.bfloat16 if mixed and method == "lora" else torch.float32
        base, model = make(method, level if compiled else "none", frozen)
        names = [name for name, _ in model.named_parameters()]
        layers = layers_of(base)
        if compiled:
            compile_layers(layers)
        assert names == [name for name, _ in model.named_parameters()]
        run = functools.partial(through, layers, base.get_decoder().rotary_emb, mixed=mixed)
        found.append(Trial(model, run))
    return found[0], found[1]


def compare(plain: Trial, compiled: Trial, shape: tuple[int, int], tolerance: float) -> None:
    """Outputs and gradients, each relative to its norm."""
    told = []
    for trial in (plain, compiled):
        trial.model.zero_grad()
        states = trial.run(shape)
        states.square().sum().backward()
        told.append(gradients(trial.model) | {"output": states.detach()})
    assert told[0].keys() == told[1].keys()
    for name, expected in told[0].items():
        assert float((told[1][name] - expected).norm()) <= tolerance * float(expected.norm()), name


@pytest.fixture
def partitioned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are made and cut into forward and backward pass as for Inductor, and then run as they are: quicker."""
    compile_so = functools.partial(torch.compile, fullgraph=True, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(compiling.torch, "compile", lambda function, **options: compile_so(function))


def test_layers_agree_in_float32() -> None:
    compare(*plain_and_compiled("full", "selective", False), (2, 12), 1e-5)
    assert graphs() == 1, "one for all layers"


@pytest.mark.parametrize("method", ["full", "lora"])
def test_any_shape_needs_two_graphs(method: str, partitioned: None) -> None:
    plain, compiled = plain_and_compiled(method, "selective", False)
    for shape in ((2, 12), (3, 20), (2, 33)):
        compare(plain, compiled, shape, 1e-5)
    assert graphs() == 2


def test_float32_adapters_on_a_half_precision_base_round_as_without_compiling() -> None:
    """Where kernels keep float32 between operations, gradients differ by 2 to 3 percent. Torch 2.11's do."""
    close = torch.__version__ >= (2, 13)
    compare(*plain_and_compiled("lora", "none", True), (2, 12), 5e-3 if close else 5e-2)


@pytest.mark.parametrize("name", ["whole_to_parts", "parts_to_whole", "slice_to_parts", "parts_to_slice"])
def test_collectives_keep_their_gradients(name: str, tmp_path: Path) -> None:
    """Under torch 2.11 a sum in place inside a compiled function silently loses them (pytorch issue 180642)."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        told = []
        for backend in (None, "eager", "aot_eager"):
            states = torch.arange(24.0).view(2, 3, 4).requires_grad_()

            def layer(states: torch.Tensor) -> torch.Tensor:
                return getattr(collectives, name)(2 * states, group).sin()

            run = torch.compile(layer, backend=backend, fullgraph=True) if backend else layer
            run(states).sum().backward()
            assert states.grad is not None
            told.append(states.grad)
        assert torch.equal(told[0], told[1])
        assert torch.equal(told[0], told[2])
    finally:
        dist.destroy_process_group()


def test_what_is_kept_obeys_the_level(partitioned: None) -> None:
    kept = {}
    level: Level
    for level in ("none", "selective", "full"):
        torch._dynamo.reset()
        _, compiled = plain_and_compiled("lora", level, False)
        own = {weight.data_ptr() for weight in compiled.model.parameters()}
        states = compiled.run((2, 12))  # which holds its node
        node: Any = states.grad_fn
        tensors = [tensor for tensor in node.saved_tensors if tensor is not None]
        kept[level] = sum(tensor.nbytes for tensor in tensors if tensor.data_ptr() not in own)
    assert kept["none"] > kept["selective"] > kept["full"]


def test_loss_agrees_for_any_number_of_tokens_with_one_graph() -> None:
    loss = compiled_token_loss()
    for tokens in (7, 33, 2):
        draw = torch.Generator().manual_seed(tokens)
        logits = (8 * torch.randn(tokens, 301, generator=draw)).bfloat16().requires_grad_()
        targets = torch.randint(301, (tokens,), generator=draw)
        other = logits.detach().clone().requires_grad_()
        expected, result = token_loss(logits, targets), loss(other, targets)
        assert result.dtype == torch.float32
        kept = [tensor.dtype for tensor in result.grad_fn.saved_tensors if tensor.numel() > tokens]
        assert kept == [torch.bfloat16], "logits in float32 are never written"
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=0)
        expected.backward()
        result.backward()
        torch.testing.assert_close(other.grad, logits.grad, rtol=1e-2, atol=1e-6)
    assert graphs() == 1


class Breaks(nn.Module):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return states + 1


def test_a_layer_in_pieces_is_refused() -> None:
    layer = Breaks()
    compile_layers([layer])
    with pytest.raises(UserError, match=r"refuses Breaks \(.*\); use select_strategy\.compile=false"):
        layer(torch.ones(2))


def test_too_many_graphs_are_refused_not_run_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "GRAPHS", 1)

    class Branches(nn.Module):
        def forward(self, states: torch.Tensor, way: str) -> torch.Tensor:
            return states + len(way)

    layer = Branches()
    with torch._dynamo.config.patch(recompile_limit=1):
        compile_layers([layer])
        layer(torch.ones(2), "a")
        with pytest.raises(UserError, match="refuses Branches"):
            layer(torch.ones(2), "bc")


def test_compiling_is_possible_here() -> None:
    assert why_not(CPU) is None


@pytest.mark.parametrize(("variable", "said"), [(None, "g++"), ("/no/such/c++ -O1", "/no/such/c++")])
def test_no_compiler(variable: str | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    if variable is None:
        monkeypatch.delenv("CXX", raising=False)
    else:
        monkeypatch.setenv("CXX", variable)
    assert f"{said}; install one, or set CXX" in (why_not(CPU) or "")


def test_no_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.sysconfig, "get_paths", lambda scheme: {"include": "/nowhere"})
    assert "python3-dev" in (why_not(CPU) or "")


def test_switched_off() -> None:
    with torch._dynamo.config.patch(disable=True):
        assert "TORCHDYNAMO_DISABLE" in (why_not(CPU) or "")


@pytest.mark.parametrize(
    ("capability", "triton", "said"),
    [
        ((6, 1), True, "capability 6.1 and Triton needs 7.0"),
        ((9, 0), False, "not installed"),
        ((9, 0), True, None),
    ],
)
def test_gpus(
    capability: tuple[int, int], triton: bool, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla P40")
    found = object() if triton else None
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: found)
    reason = why_not(torch.device("cuda", 0))
    assert reason is None if said is None else said in (reason or "")
