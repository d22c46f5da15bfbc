"""The device mesh of a plan: which ranks hold copies, shards, slices and stages of the model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import TYPE_CHECKING

from tasks.contracts import Plan

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

# Outermost first. What talks most is innermost, where neighbouring ranks share a node's fast links.
AXES = ("pp", "dp_replicate", "dp_shard", "tp")
DATA_AXES = ("dp_replicate", "dp_shard")


@dataclass(frozen=True)
class Layout:
    """A plan's ranks as a grid: rank numbers count along the last axis first. Axes of degree 1 are left out."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return prod(self.sizes)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where a rank stands on every axis of AXES (0 on those left out)."""
        place = dict.fromkeys(AXES, 0)
        for axis, size in zip(reversed(self.axes), reversed(self.sizes), strict=True):
            rank, place[axis] = divmod(rank, size)
        return place

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """The ranks that differ along `axes` alone, group by group: those that talk over these axes."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.ranks):
            place = self.coordinate(rank)
            found.setdefault(tuple(place[axis] for axis in AXES if axis not in axes), []).append(rank)
        return tuple(tuple(ranks) for ranks in found.values())


def layout(plan: Plan) -> Layout:
    if plan.processes == 1:
        return Layout((), ())
    axes = tuple(axis for axis in AXES if getattr(plan, axis) > 1)
    return Layout(axes, tuple(getattr(plan, axis) for axis in axes))


def data_rank(plan: Plan, rank: int) -> int:
    """Which of the plan's `shares` of a step a rank works on; ranks of one model copy have the same."""
    place = layout(plan).coordinate(rank)
    return place["dp_replicate"] * plan.dp_shard + place["dp_shard"]


@contextmanager
def joined(plan: Plan, timeout: timedelta) -> Iterator[None]:
    """Inside, this process is a rank of torchrun's group, on its own GPU if the plan has GPUs.

    Args:
        timeout: the longest that a rank waits for the others in a collective.
    """
    import torch
    import torch.distributed as dist

    if plan.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("cpu:gloo,cuda:nccl" if plan.backend == "nccl" else "gloo", timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


def build_mesh(plan: Plan) -> DeviceMesh | None:
    """The plan's DeviceMesh with named axes; None for a plan of one process.

    Collective: every rank of a process group of `plan.world_size` ranks calls it.
    """
    from torch.distributed.device_mesh import init_device_mesh

    grid = layout(plan)
    if not grid.axes:
        return None
    return init_device_mesh(plan.device, grid.sizes, mesh_dim_names=grid.axes)


def data_mesh(mesh: DeviceMesh, plan: Plan) -> DeviceMesh:
    """The part of the mesh over which weights are shared: (copies, shards), or shards alone."""
    axes = tuple(axis for axis in DATA_AXES if getattr(plan, axis) > 1)
    return mesh[axes] if len(axes) > 1 else mesh[axes[0]]


def group_over(plan: Plan, *axes: str) -> ProcessGroup | None:
    """This rank's group of those that differ along `axes` alone; None if it would be alone in it.

    Collective: every rank of the plan calls it, with the same axes.
    """
    return _own_group(ranks for ranks in layout(plan).groups(*axes) if len(ranks) > 1)


def first_and_last_stage(plan: Plan) -> ProcessGroup | None:
    """The group of this rank's pipeline's two ends, on those; None elsewhere. Collective."""
    return _own_group((ranks[0], ranks[-1]) for ranks in layout(plan).groups("pp"))


def _own_group(groups: Iterable[tuple[int, ...]]) -> ProcessGroup | None:
    import torch.distributed as dist

    mine = None
    for ranks in groups:
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            mine = group
    return mine
