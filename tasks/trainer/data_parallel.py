"""torch's DataParallel: one process drives all GPUs, and copies the model from the first to each, every micro-batch.

DDP does the same with less: here weights travel at every micro-batch, one interpreter launches the kernels of all GPUs,
and the first holds all gradients and optimizer state. It is trained where it is asked for by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tasks.errors import UserError
from tasks.trainer.engine import Batch
from tasks.trainer.isolation import takes_positions
from tasks.trainer.loss import TokenLossSum
from tasks.trainer.recompute import follow_copy
from tasks.trainer.step_parts import sent_to


class DataParallel(torch.nn.DataParallel[TokenLossSum]):
    """Called with a micro-batch on the CPU; gives the sum of token losses on the first GPU.

    Rows are dealt out evenly, in order. A micro-batch of fewer rows than GPUs leaves some idle.
    """

    def __init__(self, module: TokenLossSum, gpus: int) -> None:
        """
        Args:
            module: with its numbers on the first GPU.
        """
        super().__init__(module, device_ids=list(range(gpus)))
        self._path = next(name for name, part in module.named_modules() if part is module.inner)

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]
    ) -> tuple[list[tuple[torch.Tensor, ...]], list[dict[str, Any]]]:
        """Each GPU's rows on it, with what `TokenLossSum` is told of them.

        Raises:
            UserError: the rows are packed, and the model keeps documents apart by hooks, which copies would share.
        """
        (batch,) = inputs
        if batch.positions is not None:
            if not takes_positions(self.module.inner):
                raise UserError(
                    f"packed rows of {type(self.module.inner).__name__}, which takes no positions, cannot be trained "
                    "with select_strategy.replication=data_parallel; use ddp, or prepare_data.packing=none"
                )
            self.module.isolation.settle(self._device(0))
        sent = [
            sent_to(part, self._device(index)) for index, part in enumerate(shares(batch, len(device_ids)))
        ]
        return [tensors for tensors, _ in sent], [told for _, told in sent]

    def replicate(self, module: TokenLossSum, device_ids: Sequence[Any]) -> list[TokenLossSum]:
        """Copies that compute with their own weights: what the original holds beside its submodules is found anew."""
        copies = super().replicate(module, device_ids)
        for copy in copies:
            for part in copy.modules():
                follow_copy(part)
            copy.reads(copy.get_submodule(self._path))  # type: ignore[arg-type]
        return copies

    def gather(self, outputs: Sequence[torch.Tensor], output_device: Any) -> torch.Tensor:
        return torch.stack([output.to(self._device(0)) for output in outputs]).sum()

    def _device(self, index: int) -> torch.device:
        return torch.device(self.src_device_obj.type, self.device_ids[index])


def shares(batch: Batch, gpus: int) -> list[Batch]:
    """The rows of a micro-batch in at most `gpus` equal parts, the last maybe smaller."""
    size = -(-len(batch.input_ids) // gpus)
    parts = zip(batch.input_ids.split(size), batch.labels.split(size), strict=True)
    positions = [None] * gpus if batch.positions is None else batch.positions.split(size)
    return [Batch(ids, labels, where) for (ids, labels), where in zip(parts, positions, strict=False)]
