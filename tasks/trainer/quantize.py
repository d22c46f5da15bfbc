"""QLoRA's frozen base: linear layers in NF4 with double quantisation (arXiv:2305.14314, section 3).

The format and the kernels that read it are bitsandbytes'. What is written here is which numbers are kept, so that they
depend on the model's file alone, not on plan or device: bitsandbytes sums and rounds otherwise on a CPU than on a GPU.
A matrix is quantised whole, then cut at the borders of its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from tasks.errors import UserError

BLOCK = 64  # weights with one scale, along the flattened matrix
SCALES = 256  # scales with one step
LEAST = 2.0**-126  # of a scale that is divided by: the smallest normal float32


class NF4(NamedTuple):
    """A matrix: two 4-bit codes a byte, and an 8-bit code a block for its scale = step x table[code] + offset."""

    packed: torch.Tensor
    codes: torch.Tensor
    steps: torch.Tensor
    offset: torch.Tensor


@lru_cache(maxsize=4)
def tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """bitsandbytes' 16 numbers of NF4 and 256 of its dynamic 8-bit type, ascending."""
    from bitsandbytes.functional import create_dynamic_map, get_4bit_type  # nothing but qlora needs it

    numbers: torch.Tensor = get_4bit_type("nf4", device=device)
    return numbers, create_dynamic_map(signed=True).to(device)


def nf4(weight: torch.Tensor) -> NF4:
    """The matrix in NF4, the same on every device: exact products, nearest neighbours, one mean in float64."""
    numbers, table = tables(weight.device)
    flat = weight.detach().float().flatten()
    codes, scales = _nearest(flat, numbers, BLOCK)
    codes = functional.pad(codes, (0, codes.numel() % 2))
    offset = scales.double().mean().float()
    coded, steps = _nearest(scales - offset, table, SCALES)
    return NF4(codes[::2] << 4 | codes[1::2], coded, steps, offset)


def _nearest(flat: torch.Tensor, table: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales): of each number over the largest of its block, the nearest place in an ascending table."""
    blocks = functional.pad(flat, (0, -flat.numel() % size)).view(-1, size)
    scales = blocks.abs().amax(1)
    middles = (table[:-1] + table[1:]) / 2
    shares = (blocks * (1 / scales.clamp(min=LEAST)).unsqueeze(1)).clamp(-1, 1)
    codes = torch.bucketize(shares, middles, out_int32=True).to(torch.uint8)
    return codes.flatten()[: flat.numel()], scales


class NF4Linear(nn.Linear):
    """A frozen linear layer in NF4, or a part of one.

    Its weight is the packed matrix, of shape (bytes,), so FSDP2 shards it as bytes; scales are buffers, whole on every
    rank. A part's scales are float32: blocks of scales do not end where it does.
    """

    def __init__(self, linear: nn.Linear, device: torch.device, keep: torch.device) -> None:
        """Quantises on `device`; the result is left on `keep`."""
        nn.Module.__init__(self)  # nn.Linear's own would draw a weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.made_of, self._kept = linear.weight.shape, None
        bias = linear.bias
        self.bias = None if bias is None else nn.Parameter(bias.detach().to(keep), requires_grad=False)
        made = nf4(linear.weight.detach().to(device))
        self.weight = nn.Parameter(made.packed.to(keep), requires_grad=False)
        self.register_buffer("scales", made.codes.to(keep), persistent=False)
        self.register_buffer("steps", made.steps.to(keep), persistent=False)
        self.register_buffer("offset", made.offset.to(keep), persistent=False)
        self.register_buffer("table", tables(device)[1].to(keep), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        kind = inputs.device.type
        if torch.is_autocast_enabled(kind):
            inputs = inputs.to(torch.get_autocast_dtype(kind))
        shape = (self.out_features, self.in_features)
        return _Product.apply(
            inputs, self.bias, shape, self.weight, self.scales, self.steps, self.offset, self.table
        )

    def matrix(self, dtype: torch.dtype) -> torch.Tensor:
        """The numbers that 4 bits stand for, (out_features, in_features)."""
        shape = (self.out_features, self.in_features)
        return _matrix(dtype, shape, self.weight, self.scales, self.steps, self.offset, self.table)

    def keep(self, dim: int, spans: Sequence[tuple[int, int]]) -> None:
        """Leaves of the matrix, in place, the rows (dim 0) or columns (dim 1) of `spans` (start, size), in order."""
        self._kept = dim, spans
        rows, columns = self.out_features, self.in_features
        scales = _scales(self.scales, self.steps, self.offset, self.table)
        lines, each = (1, columns) if dim == 0 else (rows, 1)  # a span is one run of numbers in every line
        aligned = all(number * each % BLOCK == 0 for span in spans for number in span)
        assert aligned and (dim == 0 or columns % BLOCK == 0), (
            "the plan's rules let matrices be cut between blocks alone"
        )

        def part(stored: torch.Tensor, numbers: int) -> torch.Tensor:
            """Of what holds so many numbers an entry."""
            table = stored.view(lines, -1)
            runs = [(start * each // numbers, size * each // numbers) for start, size in spans]
            return torch.cat([table.narrow(1, *run) for run in runs], 1).flatten()

        self.weight = nn.Parameter(part(self.weight.detach(), 2), requires_grad=False)
        self.scales = part(scales, BLOCK)
        self.steps = self.offset = self.table = None
        left = sum(size for _, size in spans)
        self.out_features, self.in_features = (left, columns) if dim == 0 else (rows, left)

    def fill(self, matrix: torch.Tensor, shards: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Takes its numbers, which it had only shapes of, from the whole matrix that it stands for, on its device.

        Args:
            shards: where in the packed bytes of this part each shard of them that is here begins, and the shard.
        """
        with torch.device("meta"):
            plain = nn.Linear(self.made_of[1], self.made_of[0], bias=False)
        plain.weight = nn.Parameter(matrix, requires_grad=False)
        made = NF4Linear(plain, matrix.device, matrix.device)
        if self._kept is not None:
            made.keep(*self._kept)
        for start, shard in shards:
            shard.copy_(made.weight[start : start + shard.numel()])
        for name, _ in list(self.named_buffers()):
            setattr(self, name, made.get_buffer(name))


def _scales(
    scales: torch.Tensor, steps: torch.Tensor | None, offset: torch.Tensor | None, table: torch.Tensor | None
) -> torch.Tensor:
    """One float32 a block."""
    if steps is None:
        return scales
    numbers = torch.ops.bitsandbytes.dequantize_blockwise(scales, steps, table, SCALES, torch.float32)
    return numbers + offset


def _matrix(
    dtype: torch.dtype,
    shape: tuple[int, int],
    packed: torch.Tensor,
    *scales: torch.Tensor | None,
    again: bool = False,
) -> torch.Tensor:
    """`again`: read for the backward pass. Of two equal calls torch.compile makes one and keeps what it gives, so whole
    matrices; this one is made to look other.
    """
    read = torch.float32 if dtype == torch.float64 else dtype  # what bitsandbytes reads NF4 as
    # A row a block: its CPU kernel lets a block end with its row (0.50.2), and so misreads rows that no blocks fill.
    count = 2 * packed.numel()
    a_row = 2 * BLOCK if again and count % (2 * BLOCK) == 0 else BLOCK
    rows = (count // a_row, a_row) if count % BLOCK == 0 else (1, count)
    numbers: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit(
        packed, _scales(*scales), BLOCK, "nf4", rows, read
    )
    return numbers.flatten()[: shape[0] * shape[1]].view(shape).to(dtype)


class _Product(torch.autograd.Function):
    """inputs x matrix^T + bias. The matrix is read anew for the backward pass, and inputs are not kept."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        bias: torch.Tensor | None,
        shape: tuple[int, int],
        *stored: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.shape = shape
        ctx.save_for_backward(*stored)
        return functional.linear(inputs, _matrix(inputs.dtype, shape, *stored), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        stored = ctx.saved_tensors  # asked for once: a recomputed layer makes them then
        return gradient @ _matrix(gradient.dtype, ctx.shape, *stored, again=True), *[None] * (2 + len(stored))


# --- models -------------------------------------------------------------------------------------


def quantize(base: PreTrainedModel, dtype: torch.dtype, device: torch.device, keep: torch.device) -> None:
    """In place: every linear layer but the head becomes NF4, other weights `dtype`; what is trained stays as it is.

    Args:
        base: with weights as in the model's file, so that NF4 is made of these and not of what `dtype` rounds them to.
        device: quantises, a matrix at a time.
        keep: where the result is left.

    Raises:
        UserError: there is nothing to quantise.
    """
    found = _linear_layers(base)
    for path in found:
        parent, _, name = path.rpartition(".")
        setattr(base.get_submodule(parent), name, NF4Linear(base.get_submodule(path), device, keep))
    adapted = any("lora_" in name for name, _ in base.named_parameters())
    for name, weight in base.named_parameters():
        trained = "lora_" in name or (adapted and weight.requires_grad)
        if weight.is_floating_point() and not trained:
            weight.data = weight.data.to(dtype)
    if not found:
        raise UserError(
            f"train.finetuning_type=qlora keeps linear layers in 4 bits, and {type(base).__name__} has none; "
            "use train.finetuning_type=lora"
        )


def _linear_layers(base: PreTrainedModel) -> list[str]:
    """Names of what QLoRA quantises; no layer is held here, so that each is freed as it is replaced."""
    head = base.get_output_embeddings()
    spared = set(head.modules()) if head is not None else set()
    return [
        path
        for path, module in base.named_modules()
        if type(module) is nn.Linear and module not in spared and "lora_" not in path
    ]


def dequantize(model: nn.Module, dtype: torch.dtype) -> None:
    """In place: every NF4 layer becomes a plain one with the same numbers, rounded to `dtype`."""
    for path, module in list(model.named_modules()):
        if isinstance(module, NF4Linear):
            with torch.device("meta"):
                plain = nn.Linear(module.in_features, module.out_features, bias=False)
            plain.weight = nn.Parameter(module.matrix(dtype), requires_grad=False)
            plain.bias = module.bias
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, plain)
