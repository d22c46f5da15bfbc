"""What DeepSpeed's optimizers hold of every trainable parameter on this rank, by the parameter's name.

DeepSpeed keeps weights and moments in flat buffers, so a rank's share of a parameter is a run of its numbers (see
`fragments`). The places are read from its optimizers' own tables (0.19: `_hp_mapping`, `grad_position`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tasks.trainer.fragments import Fragment


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
        self._weights = list(trainable.values())

    def flat(self, group: int) -> torch.Tensor:
        """The buffer of weights number `group`: what the plain optimizer moves."""
        if self.stage == 0:
            return self._weights[group].detach().view(-1)
        name = "single_partition_of_fp32_groups" if self.stage == 1 else "fp32_partitioned_groups_flat"
        buffer: torch.Tensor = getattr(self._optimizer, name)[group]
        return buffer

    def moments(self, group: int) -> dict[str, Any]:
        """The plain optimizer's state of that buffer: flat tensors of its size, and numbers."""
        state = self.plain.state[self._weights[group] if self.stage == 0 else self.flat(group)]
        return {key: value.view(-1) if _is_like(value) else value for key, value in state.items()}

    def boxes(self) -> dict[str, Any]:
        """{"model": {name: box}, "optimizer": {"state": {name: {key: box or number}}}}, as every plan writes them."""
        weights: dict[str, Any] = {}
        states: dict[str, Any] = {}
        for piece in self.fragments:
            weights[piece.name] = piece.box(self.flat(piece.group))
            states[piece.name] = {
                key: piece.box(value) if _is_like(value) else _number(value)
                for key, value in self.moments(piece.group).items()
            }
        return {"model": weights, "optimizer": {"state": states}}

    def fill(self) -> None:
        """Makes the state that the plain optimizer only makes at its first step; it is that of no step taken."""
        groups = {piece.group for piece in self.fragments}
        for group in sorted(groups):
            weight = self._weights[group] if self.stage == 0 else self.flat(group)
            if self.plain.state.get(weight):
                continue
            like = weight.detach()
            self.plain.state[weight] = {
                "step": torch.zeros((), dtype=torch.float32, device=like.device),
                "exp_avg": torch.zeros_like(like),
                "exp_avg_sq": torch.zeros_like(like),
            }

    def take(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """After a load into `boxes`: numbers go back to the optimizer, and the model is given its weights."""
        for piece in self.fragments:
            own = self.plain.state[self._weights[piece.group] if self.stage == 0 else self.flat(piece.group)]
            for key, value in states[piece.name].items():
                if isinstance(own[key], int):
                    own[key] = int(value)
        if self.stage == 1:
            self._optimizer.update_lp_params()
        elif self.stage == 3:
            _give_back(self._optimizer)


def _stage(optimizer: Any) -> int:
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return 3
    return 1 if hasattr(optimizer, "single_partition_of_fp32_groups") else 0


def _is_like(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _number(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.tensor(float(value))


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


def _give_back(optimizer: Any) -> None:
    optimizer._partition_all_parameters()  # small ones stay whole on every rank, and are gathered anew below
    for group in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(group)
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
