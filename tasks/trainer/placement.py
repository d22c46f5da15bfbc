"""Where a model lies that only computes: on one device, or over all visible GPUs and then host memory."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.utils import get_balanced_memory
from torch import nn

from tasks.stage import say

FILLED = 0.9  # of a GPU's free memory; the rest is for hidden states, caches and logits
DeviceMap = dict[str, int | str]


def device() -> torch.device:
    """Where a single process works: the first visible GPU, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def place(model: Any) -> Any:
    """The model, loaded into host memory, ready to compute in eval mode: on `device()` if its weights fit there.

    Otherwise layers are dealt out over the visible GPUs, and those that find no room stay in host memory and visit the
    first GPU when they are needed. This is said.
    """
    model = model.eval()
    spread = device_map(model, free_memory())
    if spread is None:
        return model.to(device())
    say(described(model, spread))
    return dispatch(model, spread)


def free_memory() -> dict[int, int]:
    """Bytes free on each visible GPU."""
    if not torch.cuda.is_available():
        return {}
    gc.collect()  # a model that was here before may hang in cycles of hooks
    torch.cuda.empty_cache()
    return {index: torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())}


def device_map(model: Any, free: Mapping[int, int]) -> DeviceMap | None:
    """Module of the model (within an adapter's base) -> GPU or "cpu"; None where one device holds all.

    Args:
        free: bytes of each GPU; none is a machine that computes on its CPU.
    """
    size = weight_bytes(model)
    if not free or size <= FILLED * free[min(free)]:
        return None
    inner, whole = base_of(model), list(model._no_split_modules or ())
    room: dict[int | str, int] = {index: int(FILLED * count) for index, count in free.items()}
    # What stays in host memory lies there already, so it has room.
    limits = get_balanced_memory(inner, {**room, "cpu": 2 * size}, no_split_module_classes=whole)
    return dict(infer_auto_device_map(inner, limits, no_split_module_classes=whole))


def dispatch(model: Any, spread: DeviceMap, **options: Any) -> Any:
    """The model with accelerate's hooks, which bring inputs (and weights that are elsewhere) to where a layer runs.

    Args:
        options: of `accelerate.dispatch_model`.
    """
    inner = base_of(model)
    dispatch_model(inner, spread, skip_keys=inner._skip_keys_device_placement, **options)
    return model


def described(model: Any, spread: DeviceMap) -> str:
    """One sentence on what lies where."""
    held: dict[int | str, int] = dict.fromkeys(spread.values(), 0)
    for name, tensor in _tensors(base_of(model)):
        held[_place_of(name, spread)] += tensor.nbytes
    parts = [
        f"{count / 2**30:.1f} GiB {'in host memory' if where == 'cpu' else f'on GPU {where}'}"
        for where, count in held.items()
    ]
    slow = (
        "; what is in host memory crosses to the GPU for every token, which is slow" if "cpu" in held else ""
    )
    size = sum(held.values()) / 2**30
    return f"the weights take {size:.1f} GiB, more than fits on the first GPU: {', '.join(parts)}{slow}"


def weight_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers, shared ones once."""
    return sum(tensor.nbytes for _, tensor in _tensors(model))


def base_of(model: Any) -> Any:
    """The transformers model inside an adapter's, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers, shared ones once."""
    return [*model.named_parameters(), *model.named_buffers()]


def _place_of(name: str, spread: DeviceMap) -> int | str:
    while name not in spread:
        if not name:
            raise KeyError(f"no place for it in {sorted(spread)}")
        name = name.rpartition(".")[0]
    return spread[name]
