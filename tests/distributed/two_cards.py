"""torch's DataParallel on a CPU: its own replication and threads, with copies in place of what it sends between GPUs.

The originals are unreadable from a copy being made to the end of the backward pass, as weights on another GPU would be:
what is computed with them gives no numbers.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch

_true: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, original: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if not original.requires_grad:
            ctx.mark_non_differentiable(out := value.clone())
            return out
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def _broadcast(
    tensors: Sequence[torch.Tensor], devices: Sequence[int], detach: bool = False
) -> list[list[torch.Tensor]]:
    for tensor in tensors:
        if id(tensor) not in _true:
            _true[id(tensor)] = tensor, tensor.detach().clone()
            tensor.data.fill_(float("nan") if tensor.is_floating_point() else 255)
    return [[_Copy.apply(tensor, _true[id(tensor)][1]) for tensor in tensors] for _ in devices]


def restore() -> None:
    for tensor, value in _true.values():
        tensor.data.copy_(value)
    _true.clear()


def _apply(replicas: Sequence[Any], inputs: Any, kwargs: Any, devices: Sequence[int]) -> list[torch.Tensor]:
    results: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        results[number] = replicas[number](*inputs[number], **kwargs[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(replicas))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(len(replicas))]


def pretend() -> None:
    """From here on this process's `DataParallel` takes the CPU for as many cards as are asked for."""
    from tasks.trainer.data_parallel import DataParallel
    from tasks.trainer.torch_engine import TorchEngine

    inside, copying = (sys.modules[f"torch.nn.parallel.{name}"] for name in ("data_parallel", "replicate"))
    inside._get_available_device_type = lambda: "cpu"  # type: ignore[attr-defined]
    inside.parallel_apply = _apply  # type: ignore[attr-defined]
    copying._broadcast_coalesced_reshape = _broadcast  # type: ignore[attr-defined]
    make, complete = DataParallel.__init__, TorchEngine._complete_gradients

    def make_on_cpu(self: DataParallel, module: Any, gpus: int) -> None:
        make(self, module, gpus)
        self.src_device_obj = torch.device("cpu")

    def readable_again(self: TorchEngine) -> None:
        restore()
        complete(self)

    DataParallel.__init__ = make_on_cpu  # type: ignore[method-assign]
    TorchEngine._complete_gradients = readable_again  # type: ignore[method-assign]
