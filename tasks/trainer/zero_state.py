"""What DeepSpeed's optimizers hold of every trainable parameter on this rank, by the parameter's name.

DeepSpeed keeps weights and moments in flat buffers, so a rank's share of a parameter is a run of its numbers (see
`fragments`). The places are read from its optimizers' own tables (0.19: `_hp_mapping`, `grad_position`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from tasks.trainer.fragments import Fragment
from tasks.trainer.optimizers import fill, fresh_state
from tasks.trainer.training_state import number


class ZeroState:
    """The flat buffers of one rank and what lies where in them.

    Args:
        optimizer: DeepSpeed's, of ZeRO 1 to 3; or the plain one where nothing is shared out (ZeRO-0).
        trainable: by name, in the model's order.
    """

    def __init__(
        self, optimizer: Any, plain: torch.optim.Optimizer, trainable: Mapping[str, torch.nn.Parameter]
    ) -> None:
        self._optimizer, self.plain = optimizer, plain
        self.stage = _stage(optimizer)
        find = {0: _whole, 1: _of_two, 3: _of_three}[self.stage]
        self.fragments = tuple(find(optimizer, trainable))
        self.groups = sorted({piece.group for piece in self.fragments})
        self._lent: dict[int, dict[str, Any]] = {}
        self._weights = list(trainable.values())

    def flat(self, group: int) -> torch.Tensor:
        """The buffer of weights number `group`: what the plain optimizer moves. On NVMe it is empty unless asked for
        in `_here`.
        """
        if self.stage == 0:
            return self._weights[group].detach().view(-1)
        name = "single_partition_of_fp32_groups" if self.stage == 1 else "fp32_partitioned_groups_flat"
        buffer: torch.Tensor = getattr(self._optimizer, name)[group]
        return buffer

    def _moved(self, group: int) -> torch.Tensor:
        """What the plain optimizer knows the buffer by."""
        return self._weights[group] if self.stage == 0 else self.flat(group)

    def _on_disk(self, group: int) -> bool:
        return self.stage == 3 and bool(self._optimizer._swappable_optimizer_subgroup(group))

    @contextmanager
    def _here(self, group: int, changing: bool = False) -> Iterator[None]:
        """The buffers of a group are in memory meanwhile, and written back to NVMe if they are changed."""
        disk = self._on_disk(group)
        if disk:
            self._optimizer._optimizer_states_and_gradient_swap_in(group)
        yield
        if disk and changing:
            self._optimizer._optimizer_states_and_gradient_swap_out(group)
        elif disk:
            self._optimizer._release_swap_buffers(group)

    def _buffers(self, group: int) -> dict[str, Any]:
        """Weights (by the name "") and the optimizer's state of them: flat tensors of one size, and numbers. They are
        the buffers themselves, or copies of what is on NVMe.
        """
        with self._here(group):
            state = {"": self.flat(group), **self.plain.state[self._moved(group)]}
            held = {
                key: value.detach().view(-1) if _is_like(value, state[""]) else number(value)
                for key, value in state.items()
            }
            return {key: value.clone() for key, value in held.items()} if self._on_disk(group) else held

    def boxes(self) -> dict[str, Any]:
        """{"model": {name: box}, "optimizer": {"state": {name: {key: box or tensor}}}}, as every plan writes them.

        What is on NVMe is copied to host memory for it.
        """
        self._lent = {group: self._buffers(group) for group in self.groups}
        weights: dict[str, Any] = {}
        states: dict[str, Any] = {}
        for piece in self.fragments:
            held = dict(self._lent[piece.group])
            flat = held.pop("")
            weights[piece.name] = piece.box(flat)
            states[piece.name] = {
                key: piece.box(value) if _is_like(value, flat) else value for key, value in held.items()
            }
        return {"model": weights, "optimizer": {"state": states}}

    def fill(self) -> None:
        """Makes the state that the plain optimizer only makes at its first step; it is that of no step taken."""
        if self.stage == 0:
            fill(self.plain)
            return
        for group in self.groups:
            with self._here(group, changing=True):
                weight = self.flat(group)
                if not self.plain.state.get(weight):
                    self.plain.state[weight] = fresh_state(self.plain, weight)

    def take(self) -> None:
        """After a load into `boxes`: numbers go back to the optimizer, and the model is given its weights."""
        if self.stage == 3:
            self._optimizer._partition_all_parameters()  # small ones stay whole on every rank, and are gathered below
        for group in self.groups:
            with self._here(group, changing=True):
                own = self.plain.state[self._moved(group)]
                lent = self._lent[group]
                for key, value in lent.items():
                    if key and not _is_like(value, lent[""]):
                        own[key] = type(own[key])(value) if isinstance(own[key], int) else value
                    elif self._on_disk(group):
                        (own[key] if key else self.flat(group)).data.copy_(value)
                if self.stage == 3:
                    self._optimizer._reassign_or_swap_out_partitioned_parameters(group)
        self._lent = {}
        if self.stage == 1:
            self._optimizer.update_lp_params()
        elif self.stage == 3 and self._optimizer.persistent_parameters:
            persistent = self._optimizer.persistent_parameters
            persistent[0].all_gather(persistent)


def _stage(optimizer: Any) -> int:
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return 3
    return 1 if hasattr(optimizer, "single_partition_of_fp32_groups") else 0


def _is_like(value: object, flat: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == flat.numel()


def _whole(optimizer: Any, trainable: Mapping[str, torch.nn.Parameter]) -> Iterator[Fragment]:
    for group, (name, weight) in enumerate(trainable.items()):
        yield Fragment(name, weight.shape, 0, weight.numel(), group, 0)


def _of_two(optimizer: Any, trainable: Mapping[str, torch.nn.Parameter]) -> Iterator[Fragment]:
    groups = {id(weight): number for number, group in enumerate(optimizer.bit16_groups) for weight in group}
    for name, weight in trainable.items():
        place = getattr(weight, "_hp_mapping", None)
        if place is None:  # another rank's
            yield Fragment(name, weight.shape, 0, 0, groups[id(weight)], 0)
            continue
        here, there = place.lp_fragment_address, place.hp_fragment_address
        yield Fragment(name, weight.shape, here.start, here.numel, groups[id(weight)], there.start)


def _of_three(optimizer: Any, trainable: Mapping[str, torch.nn.Parameter]) -> Iterator[Fragment]:
    rank = torch.distributed.get_rank(optimizer.dp_process_group)
    for name, weight in trainable.items():
        group, at, room = optimizer.grad_position[optimizer.get_param_id(weight)]
        start = min(rank * room, weight.ds_numel)
        # The last share is padded.
        yield Fragment(name, weight.ds_shape, start, min(room, weight.ds_numel - start), group, at)
