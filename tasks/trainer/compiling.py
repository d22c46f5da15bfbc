"""torch.compile where it pays: each decoder layer and the loss become kernels fused by Inductor.

Order: tensor parallelism, activation checkpointing, `compile_layers`, then FSDP2 or DDP.
- Checkpointing lies inside the compiled function, where Inductor's partitioner obeys it. Around it, each recomputation
  would run a compiled layer as a whole, and "selective" would find no matrix products to keep.
- Tensor parallelism's hooks sit inside a layer, so they must be there when it is traced; their collectives become part
  of the graph.
- FSDP2's hooks sit on the layer, and it is only `forward` that is compiled: gathering and scattering stay outside. A
  module inside the layer with FSDP2 hooks of its own cannot be traced.
- DDP reduces a bucket as soon as its gradients are there, which layer by layer they are; Dynamo's own splitting of
  graphs for DDP does not go with checkpointing (pytorch issue 104674) and is switched off.
Autograd functions inside a layer must not return what they changed in place: torch 2.11 silently loses its gradient
(pytorch issue 180642).
Layers are compiled one by one, not the whole model: they are alike, so one graph serves all of them.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from tasks.errors import UserError
from tasks.trainer.loss import TokenLoss, token_loss

LEAST_CAPABILITY = (7, 0)  # of a GPU that Triton makes kernels for
# A fused kernel would keep in float32 what the layers as written round to half precision in between: no less true, but
# another result than without compiling, and a plan should not round otherwise than its neighbour. With this they round
# alike (seen with torch 2.13 on a CPU: gradients differ by 1e-7 instead of 2e-2; torch 2.11 does not follow there).
INDUCTOR = {"emulate_precision_casts": True}
# Graphs of one function: rows of one shape, of any shape, of one row; each with and without gradients, and for a first
# layer, whose input needs none. Dynamo's own limit of 8 is for a whole program's mistakes.
GRAPHS = 64


def compile_layers(layers: Sequence[nn.Module]) -> None:
    """Compiles the `forward` of each layer in place; names of parameters stay.

    The first shape is compiled as it is, a second one for any number of rows and tokens. A layer that cannot be traced
    as one graph stops the run at its first step, since the pieces between graph breaks would run uncompiled unseen.
    """
    _prepare()
    for layer in layers:
        compiled = torch.compile(layer.forward, fullgraph=True, options=INDUCTOR)
        layer.forward = _explained(compiled, type(layer).__name__)  # type: ignore[method-assign]


def compiled_token_loss() -> TokenLoss:
    """`token_loss` as fused kernels that read half-precision logits and never write them out in float32.

    Kept for the backward pass are the logits themselves and two numbers a token. Logits need one row at least.
    """
    _prepare()
    compiled = _explained(torch.compile(token_loss, fullgraph=True, options=INDUCTOR), "the loss")

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # How many tokens are learnt differs from micro-batch to micro-batch; no graph for the first number alone.
        torch._dynamo.maybe_mark_dynamic(logits, 0)
        torch._dynamo.maybe_mark_dynamic(targets, 0)
        return compiled(logits, targets)

    return loss


def _prepare() -> None:
    """Settings of torch.compile, which are the process's."""
    torch._dynamo.config.recompile_limit = max(GRAPHS, torch._dynamo.config.recompile_limit)
    torch._dynamo.config.optimize_ddp = False
    # As without compiling, where backward() is called outside autocast and works in the types of the forward pass.
    torch._functorch.config.backward_pass_autocast = "off"
    # It warns of in-place operations in what is checkpointed selectively; a layer has none.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)


def _explained(compiled: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Says what to do when Dynamo or Inductor refuse, which they do at a call."""

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason")
            raise UserError(
                f"compiled plans need one graph a layer, and torch.compile refuses {what} ({reason}); "
                "use select_strategy.compile=false"
            ) from error

    return call


def why_not(device: torch.device) -> str | None:
    """The sentence why nothing can be compiled for `device` here, or None."""
    if torch._dynamo.config.disable:
        return "TORCHDYNAMO_DISABLE or TORCH_COMPILE_DISABLE switches torch.compile off here; unset it"
    if not torch._dynamo.is_dynamo_supported():
        version = ".".join(map(str, sys.version_info[:2]))
        return f"torch {torch.__version__} cannot compile under Python {version}; use an older Python"
    return _why_not_on_gpu(device) if device.type == "cuda" else _no_compiler(("CXX",), ("g++",))


def _why_not_on_gpu(device: torch.device) -> str | None:
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        has, needs = (".".join(map(str, pair)) for pair in (capability, LEAST_CAPABILITY))
        return (
            f"{name} has compute capability {has} and Triton needs {needs}; use a newer GPU, or compile=false"
        )
    if importlib.util.find_spec("triton") is None:
        return "torch.compile makes GPU kernels with Triton, which is not installed; `pip install triton`"
    return _no_compiler(("CC",), ("gcc", "clang"))


def _no_compiler(variables: Sequence[str], names: Sequence[str]) -> str | None:
    """What Inductor (C++, kernels for a CPU) or Triton (C, how a kernel is started) would not find.

    Args:
        variables: of the environment, that name a compiler before all.
        names: commands, if no variable is set.
    """
    said = next((os.environ[variable] for variable in variables if os.environ.get(variable)), None)
    wanted = [said.split()[0]] if said else list(names)
    if not any(shutil.which(name) for name in wanted):
        missing = " or ".join(wanted)
        return (
            f"torch.compile needs a compiler and does not find {missing}; install one, or set {variables[0]}"
        )
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton asks on Debian
    header = Path(sysconfig.get_paths(scheme)["include"]) / "Python.h"
    if not header.is_file():
        return f"torch.compile needs Python's headers and does not find {header}; install python3-dev"
    return None
