"""FSDP2 over parameters of integers, which torch 2.11 cannot make."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def integer_parameters() -> Iterator[None]:
    """Inside, a parameter made of integers needs no gradient unless it is said.

    `fully_shard` of torch 2.11 makes a parameter first and says afterwards that it needs none, which fails for codes of
    4 bits (pytorch/pytorch#177844, mended in later versions, where this changes nothing).
    """
    plain = nn.Parameter.__new__

    def made(cls: type, data: Any = None, requires_grad: bool | None = None) -> Any:
        if requires_grad is None:
            kind = torch.float32 if data is None else data.dtype
            requires_grad = kind.is_floating_point or kind.is_complex
        return plain(cls, data, requires_grad)

    nn.Parameter.__new__ = made
    try:
        yield
    finally:
        nn.Parameter.__new__ = plain
