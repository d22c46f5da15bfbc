"""A rank's pieces of the trainable parameters: what is whole where, whose gradients are sums, who counts what.

Under every plan a rank's piece of a parameter is one box of the whole: tensor parallelism cuts one dim, FSDP2 then
the first, and stages hold other parameters. Of a matrix that is several in one, it is a box of each. So checkpoints
need no more than boxes, and any plan reads any other's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tasks.trainer.tensor_parallel import Cut, TensorParts


@dataclass(frozen=True)
class Piece:
    """This rank's part of the trainable parameter `name` of the whole model.

    `weight` is what the optimizer moves: these `boxes` of the parameter of `shape`, one after another in the first
    dim. `summed`: its gradient is one term of a sum over tensor-parallel ranks. `tied`: a pipeline's first and last
    stage both hold it, and its gradient is the sum of theirs. `counted`: of several ranks (or stages) that hold the
    same, this one adds it to the norm.
    """

    name: str
    weight: torch.nn.Parameter
    shape: torch.Size
    boxes: tuple[ChunkStorageMetadata, ...]
    summed: bool
    tied: bool
    counted: bool

    def box(self, tensor: torch.Tensor) -> Box:
        """A tensor of the weight's shape (the weight, a moment) as what it is of the whole."""
        return Box.of(local(tensor), self.shape, self.boxes)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def pieces_of(
    model: torch.nn.Module,
    parts: TensorParts | None,
    canonical: Mapping[str, str],
    first_stage: bool,
    frozen: bool = False,
) -> Iterator[Piece]:
    """The pieces of one stage's model.

    Args:
        canonical: other names of tied parameters -> the name that a checkpoint knows.
        first_stage: of a pipeline (or there is none), which counts what is tied.
        frozen: of parameters that are not trained, too.
    """
    rank = parts.group.rank() if parts else 0
    tied = set(canonical.values())
    for own_name, weight in model.named_parameters():
        if not weight.requires_grad and not frozen:
            continue
        name = canonical.get(own_name, own_name)
        cut = parts.cuts.get(own_name) if parts else None
        offsets: Sequence[int] = [0] * weight.dim()
        if isinstance(weight, DTensor):
            _, offsets = compute_local_shape_and_global_offset(
                weight.shape, weight.device_mesh, weight.placements
            )
        yield Piece(
            name=name,
            weight=weight,
            shape=cut.whole if cut else weight.shape,
            boxes=tuple(boxes_of(offsets, local(weight).shape, cut)),
            summed=parts is not None and own_name in parts.summed,
            tied=name in tied,
            counted=(first_stage or name not in tied) and (cut is not None or rank == 0),
        )


def boxes_of(offsets: Sequence[int], sizes: torch.Size, cut: Cut | None) -> Iterator[ChunkStorageMetadata]:
    """What the box from `offsets` on of a rank's part is of the whole: one box in each of the cut's spans it meets."""
    if not sizes.numel():
        return
    if cut is None:
        yield ChunkStorageMetadata(torch.Size(offsets), sizes)
        return
    dim, before = cut.dim, 0
    for start, size in cut.spans:
        first = max(offsets[dim], before)
        last = min(offsets[dim] + sizes[dim], before + size)
        if first < last:
            at = (*offsets[:dim], start + first - before, *offsets[dim + 1 :])
            yield ChunkStorageMetadata(
                torch.Size(at), torch.Size((*sizes[:dim], last - first, *sizes[dim + 1 :]))
            )
        before += size


class Box(torch.Tensor):
    """A tensor of the whole's shape that holds one box of it, or several: what torch's distributed checkpoint writes
    and reads.
    """

    inside: dict[torch.Size, torch.Tensor]  # by where in the whole it begins

    @classmethod
    def of(cls, inside: torch.Tensor, whole: torch.Size, boxes: Sequence[ChunkStorageMetadata]) -> Box:
        inside = inside.detach()
        views = inside.split([each.sizes[0] for each in boxes]) if len(boxes) > 1 else (inside,) * len(boxes)
        return cls.holding(
            {each.offsets: view for each, view in zip(boxes, views, strict=True)}, whole, inside
        )

    @classmethod
    def holding(cls, inside: dict[torch.Size, torch.Tensor], whole: torch.Size, like: torch.Tensor) -> Box:
        """Args: inside: views by where in the whole they begin; like: has their type and device."""
        box = torch.Tensor._make_wrapper_subclass(cls, whole, dtype=like.dtype, device=like.device)
        box.inside = inside
        return box

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties(dtype=self.dtype),
                    size=self.shape,
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, view.shape) for offsets, view in self.inside.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.inside[index.offset]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"a Box is only written and read; {func} was asked of it")


def squared_norm(pieces: Iterable[Piece], device: torch.device) -> torch.Tensor:
    """Sum of squares of the gradients that this rank counts, in float64."""
    gradients = [
        local(piece.weight.grad) for piece in pieces if piece.counted and piece.weight.grad is not None
    ]
    gradients = [gradient for gradient in gradients if gradient.numel()]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(gradients)).double().square().sum()


def sum_gradients(weights: Iterable[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
    """Each gradient becomes its sum over the group, in a few flat all-reduces. Collective, same weights everywhere."""
    gradients = []
    for weight in weights:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        gradients.append(local(weight.grad))
    for bucket in _buckets(gradients):
        if len(bucket) == 1 and bucket[0].is_contiguous():  # a vocabulary's table: no copy of it
            dist.all_reduce(bucket[0], group=group)
            continue
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat, group=group)
        parts = flat.split([gradient.numel() for gradient in bucket])
        torch._foreach_copy_(bucket, [part.view_as(whole) for part, whole in zip(parts, bucket, strict=True)])


BUCKET_BYTES = 64 * 2**20


def _buckets(gradients: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and (size > BUCKET_BYTES or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.numel() * gradient.element_size()
    if bucket:
        yield bucket
