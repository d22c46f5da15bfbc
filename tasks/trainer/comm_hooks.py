"""What DDP does with a bucket of gradients: sum it as it is, in half precision, or as products of thin matrices.

All but `none` round, so they belong to the recipe and not to the plan.
"""

# No `from __future__ import annotations`: DDP reads a hook's annotations as objects.
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]
Named = Iterable[tuple[str, torch.nn.Parameter]]

# The wider a product, the nearer to the gradient and the less is saved. Up to 2, torch orthogonalises by Gram-Schmidt;
# beyond, by a QR decomposition a matrix, which is slow on a GPU.
WIDTH = 2
# Steps before it are summed whole: early gradients steer AdamW most. DDP allows 2 at least, since it orders its
# buckets anew after the first step.
FIRST_STEP = 10
# Matrices whose gradient is zero (an adapter's first half at the start) would else be divided by their norm.
EPSILON = 1e-8
LEAST_SAVED = 2  # a matrix is sent whole unless its product is smaller by this factor (torch's default)
SEED = 0


def communication_hook(name: str, process_group: dist.ProcessGroup) -> tuple[Any, Hook]:
    """(state, hook) for `DistributedDataParallel.register_comm_hook`; gradients come out averaged over the group.

    Args:
        name: none, fp16, bf16 or powersgd (train.communication_hook).
    """
    if name == "powersgd":
        return PowerSgd(process_group), PowerSgd.reduce
    hooks = {
        "none": default_hooks.allreduce_hook,
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
    }
    return process_group, hooks[name]


@dataclass(frozen=True)
class Layout:
    """One bucket: its parameters, and those that are sent as products in torch's order (alike shapes together)."""

    parameters: tuple[torch.nn.Parameter, ...]
    compressed: tuple[torch.nn.Parameter, ...]

    def is_of(self, parameters: list[torch.Tensor]) -> bool:
        return [id(one) for one in self.parameters] == [id(one) for one in parameters]


class PowerSgd:
    """torch's PowerSGD (arXiv:1905.13727), its memory kept by parameter instead of by bucket.

    What a rank could not send is added to its next gradient (error feedback), and each product starts from the one
    before. Both decide the next step, so a checkpoint carries them. torch keeps them by number of bucket, but after a
    resume DDP cuts its buckets otherwise in the first step; here they follow their parameters.
    """

    def __init__(self, process_group: dist.ProcessGroup, width: int = WIDTH, first: int = FIRST_STEP) -> None:
        self.inner = PowerSGDState(
            process_group,
            matrix_approximation_rank=width,
            start_powerSGD_iter=first,
            min_compression_rate=LEAST_SAVED,
            orthogonalization_epsilon=EPSILON,
            random_seed=SEED,
        )
        self._numbers: dict[torch.nn.Parameter, int] = {}
        self._layouts: dict[int, Layout] = {}
        self._of_this_step: set[int] = set()
        self._errors: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._products: dict[torch.nn.Parameter, torch.Tensor] = {}

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        index, parameters = bucket.index(), bucket.parameters()
        for parameter in parameters:
            self._numbers.setdefault(parameter, len(self._numbers))
        if self.inner.iter >= self.inner.start_powerSGD_iter:
            layout = self._layouts.get(index)
            if layout is None or not layout.is_of(parameters):
                self._take_apart(self._layouts.keys() - self._of_this_step)
                self._put_together(index, parameters, bucket.gradients())
            self._of_this_step.add(index)
        if bucket.is_last():
            self._of_this_step.clear()
        return powerSGD_hook(self.inner, bucket)

    # --- from buckets to parameters and back ----------------------------------------------------

    def _take_apart(self, buckets: Iterable[int]) -> None:
        """Gives what these buckets remember to their parameters. Of this step's buckets nobody asks: DDP's are
        disjoint, and theirs are still on their way."""
        for index in list(buckets):
            layout = self._layouts.pop(index)
            error = self.inner.error_dict.pop(index)
            for parameter, part in zip(
                layout.parameters, error.split([one.numel() for one in layout.parameters]), strict=True
            ):
                self._errors[parameter] = part
            products = self.inner.q_memory_dict.pop(index)
            del self.inner.p_memory_dict[index]
            for parameter, part in zip(
                layout.compressed,
                products.split([self._sizes(one)[1] for one in layout.compressed]),
                strict=True,
            ):
                self._products[parameter] = part

    def _put_together(
        self, index: int, parameters: list[torch.nn.Parameter], gradients: list[torch.Tensor]
    ) -> None:
        by_shape: dict[tuple[int, int], list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            if self._is_compressed(parameter):
                by_shape.setdefault(_shape(parameter), []).append(parameter)
        compressed = tuple(parameter for alike in by_shape.values() for parameter in alike)
        errors, like = [], gradients[0]
        for parameter in parameters:
            error = self._errors.pop(parameter, None)
            errors.append(like.new_zeros(parameter.numel()) if error is None else error.to(like))
        self.inner.error_dict[index] = torch.cat(errors)
        products = [self._product(parameter, like) for parameter in compressed]
        self.inner.q_memory_dict[index] = torch.cat(products) if products else like.new_empty(0)
        self.inner.p_memory_dict[index] = like.new_empty(sum(self._sizes(one)[0] for one in compressed))
        self._layouts[index] = Layout(tuple(parameters), compressed)

    def _product(self, parameter: torch.nn.Parameter, like: torch.Tensor) -> torch.Tensor:
        """What the parameter's product starts from: its last one, or one drawn from the seed, alike on all ranks."""
        known = self._products.pop(parameter, None)
        if known is not None:
            return known.to(like)
        draw = torch.Generator().manual_seed(SEED * 1_000_003 + self._numbers[parameter])
        return torch.randn(self._sizes(parameter)[1], generator=draw).to(like)

    def _sizes(self, parameter: torch.nn.Parameter) -> tuple[int, int]:
        """Entries of the left and the right matrix of a parameter's product."""
        rows, columns = _shape(parameter)
        width = min(rows, columns, self.inner.matrix_approximation_rank)
        return rows * width, columns * width

    def _is_compressed(self, parameter: torch.nn.Parameter) -> bool:
        return sum(self._sizes(parameter)) * self.inner.min_compression_rate < parameter.numel()

    # --- checkpoints ----------------------------------------------------------------------------

    def save(self, folder: Path, named: Named) -> None:
        """Writes this rank's memory beside a checkpoint. Call between steps."""
        self._take_apart(self._layouts.keys())
        names = {parameter: name for name, parameter in named}
        state = {
            "steps": self.inner.iter,
            "errors": {names[one]: value.cpu().clone() for one, value in self._errors.items()},
            "products": {names[one]: value.cpu().clone() for one, value in self._products.items()},
        }
        group = self.inner.process_group
        torch.save(state, folder / _file(group.rank(), group.size()))

    def load(self, folder: Path, named: Named) -> None:
        """Reads what `save` wrote; on another number of ranks each takes the mean error, so the sum goes on alike.

        A checkpoint without such files (of a plan that sends no gradients) leaves the memory empty.
        """
        rank, size = self.inner.process_group.rank(), self.inner.process_group.size()
        own = folder / _file(rank, size)
        files = [own] if own.is_file() else sorted(folder.glob(_file("*", "*")))
        states = [torch.load(file, map_location="cpu", weights_only=True) for file in files]
        if not states:
            return
        self._layouts.clear()
        for memory in (self.inner.error_dict, self.inner.q_memory_dict, self.inner.p_memory_dict):
            memory.clear()
        self.inner.iter = states[0]["steps"]
        parameters = {name: parameter for name, parameter in named if name in states[0]["errors"]}
        self._errors = {
            one: torch.stack([state["errors"][name] for state in states]).mean(0)
            for name, one in parameters.items()
        }
        self._products = {parameters[name]: value for name, value in states[0]["products"].items()}


def _shape(parameter: torch.Tensor) -> tuple[int, int]:
    return parameter.shape[0], parameter.numel() // parameter.shape[0]


def _file(rank: int | str, size: int | str) -> str:
    return f"powersgd-{rank}-of-{size}.pt"
