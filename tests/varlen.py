"""torch's variable-length attention on the CPU, where torch has no kernel: each document by itself, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen

from tasks.trainer import isolation


def use_varlen_on_cpu(patch: pytest.MonkeyPatch) -> None:
    """Isolation takes the way that GPUs have, with the operator's own schema, shapes and autograd formula."""
    varlen._varlen_attn.register_kernel("cpu", _forward)
    varlen._varlen_attn_backward.register_kernel("cpu", _backward)
    patch.setattr(isolation, "why_not_varlen", lambda inner, device: None)


@dataclass(frozen=True)
class Document:
    """Its tokens' places, queries and repeated keys and values (heads, tokens, width), and its scores."""

    places: slice
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scores: torch.Tensor


def _documents(
    query: Any, key: Any, value: Any, borders: torch.Tensor, scale: float, window: Any
) -> Iterator[Document]:
    group = query.shape[1] // key.shape[1]
    for start, end in pairwise(borders.tolist()):
        places = slice(start, end)
        q = query[places].float().transpose(0, 1)
        k, v = (part[places].float().transpose(0, 1).repeat_interleave(group, 0) for part in (key, value))
        place = torch.arange(end - start)
        back = place[:, None] - place
        seen = (back >= 0) & ((back <= window[0]) if window[0] >= 0 else True)
        yield Document(places, q, k, v, (q @ k.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf))


def _checked(query: torch.Tensor, borders: torch.Tensor, longest: int, window: Any) -> None:
    assert query.dtype in (torch.bfloat16, torch.float16), "flash attention has no other"
    assert borders.dtype == torch.int32 and borders[0] == 0 and borders[-1] == len(query)
    assert int(borders.diff().max()) <= longest
    assert window[1] == 0, "causal"


def _forward(query: Any, key: Any, value: Any, borders: Any, _: Any, longest: int, *more: Any) -> Any:
    _longest_key, _causal, scale, window, *_rest = more
    _checked(query, borders, longest, window)
    out, sums = torch.empty_like(query), query.new_empty(query.shape[1], len(query), dtype=torch.float32)
    for document in _documents(query, key, value, borders, scale, window):
        out[document.places] = (document.scores.softmax(-1) @ document.v).transpose(0, 1).to(out.dtype)
        sums[:, document.places] = document.scores.logsumexp(-1)
    return out, sums, torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, borders: Any, *more: Any
) -> Any:
    """By hand, since no graph is recorded below an operator: ds = p (dp - sum(dp p))."""
    _borders_key, longest, _longest_key, _causal, _rng, scale, window = more
    _checked(query, borders, longest, window)
    found = [torch.empty_like(part) for part in (query, key, value)]
    groups = (1, *[query.shape[1] // key.shape[1]] * 2)
    for document in _documents(query, key, value, borders, scale, window):
        p, given = document.scores.softmax(-1), grad[document.places].float().transpose(0, 1)
        dp = given @ document.v.transpose(1, 2)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
        parts = ds @ document.k, ds.transpose(1, 2) @ document.q, p.transpose(1, 2) @ given
        for whole, part, group in zip(found, parts, groups, strict=True):
            summed = part.unflatten(0, (-1, group)).sum(1)
            whole[document.places] = summed.transpose(0, 1).to(whole.dtype)
    return tuple(found)
