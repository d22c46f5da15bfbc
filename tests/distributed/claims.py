"""What must hold inside the ranks of a plan, for any device: run by `ranks.run_ranks`, which sees a failed assert."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tasks.contracts import Plan, Precision
from tasks.params import read_params
from tasks.paths import Paths

if TYPE_CHECKING:
    from tasks.trainer.engine import Batch
    from tasks.trainer.torch_engine import TorchEngine

TOKENS = 8
SMALL_SCALE = 2.0**10  # from which nothing overflows by itself here


def _join(plan: Plan) -> None:
    if plan.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("cpu:gloo,cuda:nccl" if plan.backend == "nccl" else "gloo")


def _engine(root: str, plan: Plan, precision: Precision) -> TorchEngine:
    """An engine on the workspace's model, every layer recomputed in the backward pass."""
    from tasks.trainer.loading import DTYPES, load_base
    from tasks.trainer.torch_engine import TorchEngine

    params = read_params(Path(root) / "params.yaml")
    held = "float32" if params.train.finetuning_type == "full" else precision
    base = load_base(Paths(Path(root)), DTYPES[held])
    recomputing = plan.model_copy(update={"activation_checkpointing": "full"})
    engine = TorchEngine(base, params.train, recomputing, precision, 10, params.seed)
    if engine.scaler.is_enabled():
        engine.scaler.scale(torch.ones((), device=engine.device))  # makes its state
        engine.scaler.update(SMALL_SCALE)
    return engine


def _share(step: int) -> tuple[list[Batch], int]:
    """Two micro-batches of two rows, others on every rank and step, and the targets of all ranks."""
    from tasks.trainer.engine import Batch

    draw = torch.Generator().manual_seed(100 * step + dist.get_rank())
    rows = [torch.randint(3, 259, (2, TOKENS), generator=draw) for _ in range(2)]
    return [Batch(ids, ids) for ids in rows], dist.get_world_size() * 4 * (TOKENS - 1)


def agree_at_the_first_step(root: str, one: Plan, other: Plan, precision: Precision) -> None:
    """Two plans give the first step's loss to a millionth, and every gradient up to the order of its sums."""
    from tasks.trainer.torch_engine import whole

    _join(one)
    left, right = (_engine(root, plan, precision) for plan in (one, other))
    batches, targets = _share(0)
    first, second = (engine.train_step(batches, targets, ()) for engine in (left, right))
    assert abs(first.loss - second.loss) <= 1e-6 * first.loss
    assert abs(first.grad_norm - second.grad_norm) <= 1e-5 * first.grad_norm
    assert not first.skipped and not second.skipped
    gradients = {
        name: whole(weight.grad) for name, weight in left.model.named_parameters() if weight.requires_grad
    }
    compared = 0
    for name, weight in right.model.named_parameters():
        if weight.requires_grad:
            gradient = whole(weight.grad)
            assert (gradient - gradients[name]).norm() <= 1e-5 * gradients[name].norm(), name
            compared += int(gradient.any())
    assert compared >= len(gradients) / 2 > 0


def hold_half(root: str, plan: Plan) -> None:
    """A rank of two holds half of everything; frozen weights have no gradient and no state."""
    _join(plan)
    engine = _engine(root, plan, "float32")
    engine.train_step(*_share(0), ())
    lora = engine.train.finetuning_type == "lora"
    held = every = 0
    for name, weight in engine.model.named_parameters():
        assert isinstance(weight, DTensor), name
        assert weight.requires_grad == (not lora or "lora_" in name)
        assert (weight.grad is None) != weight.requires_grad, name
        held, every = held + weight.to_local().numel(), every + weight.numel()
    assert abs(held - every / 2) < 0.02 * every
    states = engine.optimizer.state
    assert len(states) == len(engine.trainable) > 0
    for weight, state in states.items():
        assert state["exp_avg"].to_local().shape == weight.to_local().shape


def skip_together(root: str, plan: Plan) -> None:
    """One infinite number in one rank's shard: no rank steps, all halve the scale; the next step is taken by all."""
    from tasks.trainer.torch_engine import whole

    _join(plan)
    engine = _engine(root, plan, "float16")
    before = {name: whole(value).clone() for name, value in engine.model.named_parameters()}
    unscale = engine.scaler.unscale_
    overflow = dist.get_rank() == 1

    def unscale_after_overflow(optimizer: torch.optim.Optimizer) -> None:
        gradients = [weight.grad.to_local() for weight in engine.trainable]
        assert all(gradient.isfinite().all() for gradient in gradients)
        if overflow:
            gradients[-1].view(-1)[0] = float("inf")
        unscale(optimizer)

    engine.scaler.unscale_ = unscale_after_overflow
    scale = engine.scaler.get_scale()
    result = engine.train_step(*_share(0), ())
    assert result.skipped and engine.scaler.get_scale() == scale / 2
    for name, value in engine.model.named_parameters():
        assert torch.equal(whole(value), before[name]), name
    overflow = False
    result = engine.train_step(*_share(1), ())
    assert not result.skipped and 0 < result.grad_norm < float("inf")
    assert engine.scaler.get_scale() == scale / 2
    after = {name: whole(value) for name, value in engine.model.named_parameters()}
    moved = [name for name, value in after.items() if not torch.equal(value, before[name])]
    assert moved and all("lora_" in name for name in moved)
