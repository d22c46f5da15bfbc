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
from tasks.trainer.pieces import local

if TYPE_CHECKING:
    from tasks.trainer.engine import Batch, StepResult
    from tasks.trainer.torch_engine import TorchEngine

TOKENS = 8
SMALL_SCALE = 2.0**10  # from which nothing overflows by itself here


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor put together on every rank (collective), or the tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _join(plan: Plan) -> None:
    if plan.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("cpu:gloo,cuda:nccl" if plan.backend == "nccl" else "gloo")


def _engine(root: str, plan: Plan, precision: Precision) -> TorchEngine:
    """An engine on the workspace's model, every layer recomputed in the backward pass."""
    from tasks.trainer.loading import DTYPES, open_base, stored_precision
    from tasks.trainer.torch_engine import TorchEngine

    params = read_params(Path(root) / "params.yaml")
    base = open_base(Paths(Path(root)), DTYPES[stored_precision(params.train.finetuning_type, precision)])
    recomputing = plan.model_copy(update={"activation_checkpointing": "full"})
    engine = TorchEngine(base, params.train, recomputing, precision, 10, params.seed)
    engine.loss_scale.scale = SMALL_SCALE
    return engine


def _share(step: int, plan: Plan) -> tuple[list[Batch], int]:
    """This rank's micro-batches of two rows, of a step that has others each time, and the targets of all of them."""
    from tasks.trainer.engine import Batch
    from tasks.trainer.mesh import data_rank

    every = []
    for number in range(plan.accumulation * plan.data_parallel):
        draw = torch.Generator().manual_seed(100 * step + number)
        ids = torch.randint(3, 259, (2, TOKENS), generator=draw)
        every.append(Batch(ids, ids))
    return every[data_rank(plan, dist.get_rank()) :: plan.data_parallel], len(every) * 2 * (TOKENS - 1)


def _first_step(root: str, plan: Plan, precision: Precision, folder: Path) -> StepResult:
    """One step's result; its gradients are left in `folder` by parameter name, whole whatever the plan."""
    import torch.distributed.checkpoint as dcp

    engine = _engine(root, plan, precision)
    result = engine.train_step(*_share(0, plan), ())
    dcp.save(
        {"model": {piece.name: piece.box(piece.weight.grad) for piece in engine.pieces}}, checkpoint_id=folder
    )
    return result


def agree_at_the_first_step(
    root: str,
    one: Plan,
    other: Plan,
    precision: Precision,
    folder: str,
    loss: float = 1e-6,
    gradient: float = 1e-5,
) -> None:
    """Two plans give the first step's loss within `loss`, its norm and every gradient within `gradient`."""
    from tasks.trainer.training_state import read_weights

    _join(one)
    folders = Path(folder) / "one", Path(folder) / "other"
    results = [_first_step(root, plan, precision, to) for plan, to in zip((one, other), folders, strict=True)]
    first, second = results
    assert abs(first.loss - second.loss) <= loss * first.loss
    assert abs(first.grad_norm - second.grad_norm) <= gradient * first.grad_norm
    assert not first.skipped and not second.skipped
    if dist.get_rank() == 0:
        left, right = (read_weights(each, None) for each in folders)
        assert left.keys() == right.keys()
        for name, value in left.items():
            assert (value - right[name]).norm() <= gradient * value.norm(), name
        assert sum(bool(value.any()) for value in left.values()) >= len(left) / 2 > 0


def hold_half(root: str, plan: Plan) -> None:
    """A rank of two holds half of everything; frozen weights have no gradient and no state."""
    _join(plan)
    engine = _engine(root, plan, "float32")
    engine.train_step(*_share(0, plan), ())
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
    """One infinite number in one rank's piece: no rank steps, all halve the scale; the next step is taken by all."""
    _join(plan)
    engine = _engine(root, plan, "float16")
    before = {name: whole(value).clone() for name, value in engine.model.named_parameters()}
    complete = engine._complete_gradients
    overflow = dist.get_rank() == 1

    def complete_and_overflow() -> None:
        complete()
        gradients = [local(weight.grad) for weight in engine.trainable]
        assert all(gradient.isfinite().all() for gradient in gradients)
        if overflow:
            counted = [local(piece.weight.grad) for piece in engine.pieces if piece.counted]
            counted[-1].view(-1)[0] = float("inf")

    engine._complete_gradients = complete_and_overflow
    scale = engine.loss_scale.scale
    result = engine.train_step(*_share(0, plan), ())
    assert result.skipped and engine.loss_scale.scale == scale / 2
    for name, value in engine.model.named_parameters():
        assert torch.equal(whole(value), before[name]), name
    overflow = False
    result = engine.train_step(*_share(1, plan), ())
    assert not result.skipped and 0 < result.grad_norm < float("inf")
    assert engine.loss_scale.scale == scale / 2
    after = {name: whole(value) for name, value in engine.model.named_parameters()}
    moved = [name for name, value in after.items() if not torch.equal(value, before[name])]
    assert moved and all("lora_" in name for name in moved)


def sum_over_a_cut_vocabulary(width: int) -> None:
    """The loss over logits cut over ranks, and its gradient, are those of the whole, however the cut falls."""
    from tasks.trainer.collectives import vocabulary_loss

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    draw = torch.Generator().manual_seed(3)
    whole_logits = 8 * torch.randn(11, width, generator=draw, dtype=torch.float64)
    targets = torch.randint(width, (11,), generator=draw)
    targets[:2] = torch.tensor([0, width - 1])
    size = -(-width // ranks)
    logits = whole_logits[:, size * rank : size * (rank + 1)].clone().requires_grad_()
    loss = vocabulary_loss(logits, targets, size * rank, dist.group.WORLD)
    (3 * loss).backward()
    whole_logits.requires_grad_()
    expected = torch.nn.functional.cross_entropy(whole_logits, targets, reduction="sum")
    (3 * expected).backward()
    assert torch.allclose(loss, expected, rtol=1e-13)
    assert torch.allclose(logits.grad, whole_logits.grad[:, size * rank : size * (rank + 1)], atol=1e-13)


def hand_tokens_over() -> None:
    """Each collective and its backward pass, against the sums and slices that they stand for."""
    from tasks.trainer import collectives

    dist.init_process_group("gloo")
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    draw = torch.Generator().manual_seed(5)
    terms = torch.randn(ranks, 2, 3 * ranks, 4, generator=draw, dtype=torch.float64)  # a tensor a rank
    weights = torch.randn(
        ranks, 2, 3 * ranks, 4, generator=draw, dtype=torch.float64
    )  # what each makes of it
    total = terms.sum(0)

    def part(tensor: torch.Tensor, of: int = rank) -> torch.Tensor:
        return tensor.chunk(ranks, dim=1)[of]

    cases = (  # name, input here, output here, gradient of the input here when the output's is `weights[rank]`
        ("whole_to_parts", total, total, weights.sum(0)),
        ("parts_to_whole", terms[rank], total, weights[rank]),
        ("slice_to_parts", part(total), total, part(weights.sum(0))),
        ("whole_to_slice", total, part(total), torch.cat([part(weights[r], r) for r in range(ranks)], 1)),
        (
            "parts_to_slice",
            terms[rank],
            part(total),
            torch.cat([part(weights[r], r) for r in range(ranks)], 1),
        ),
        ("slice_to_whole", part(total), total, part(weights[rank])),
    )
    for name, given, expected, gradient in cases:
        tensor = given.clone().requires_grad_()
        out = getattr(collectives, name)(tensor, group)
        assert torch.allclose(out, expected), name
        out.backward(weights[rank] if out.shape == total.shape else part(weights[rank]))
        assert torch.allclose(tensor.grad, gradient), name


def need_the_optimizer(root: str, plan: Plan, folder: str) -> None:
    """A run goes on from a checkpoint as if never stopped; without the optimizer's state it would not."""
    from tasks.trainer import optimizers

    _join(plan)
    engine = _engine(root, plan, "float32")
    for step in range(3):
        engine.train_step(*_share(step, plan), ())
    engine.save(Path(folder))
    expected = [engine.train_step(*_share(step, plan), ()).loss for step in range(3, 6)]
    again = _engine(root, plan, "float32")
    again.load(Path(folder))
    assert [again.train_step(*_share(step, plan), ()).loss for step in range(3, 6)] == expected
    forgetful = _engine(root, plan, "float32")
    forgetful.load(Path(folder))
    forgetful.optimizer.state.clear()
    optimizers.fill(forgetful.optimizer)
    got = [forgetful.train_step(*_share(step, plan), ()).loss for step in range(3, 6)]
    assert got[0] == expected[0] and abs(got[2] - expected[2]) > 1e-4 * expected[2]


def resume_after_an_overflow(root: str, plan: Plan, folder: str) -> None:
    """The first step overflowed, was left out and saved: the next start goes on as this one would have."""
    _join(plan)
    engine = _engine(root, plan, "float16")
    complete = engine._complete_gradients

    def overflow() -> None:
        complete()
        local(engine.trainable[0].grad).fill_(float("inf"))

    engine._complete_gradients = overflow
    assert engine.train_step(*_share(0, plan), ()).skipped
    engine._complete_gradients = complete
    engine.save(Path(folder))
    again = _engine(root, plan, "float16")
    again.load(Path(folder))
    assert again.loss_scale.scale == engine.loss_scale.scale == SMALL_SCALE / 2
    for step in range(1, 4):
        one, other = (each.train_step(*_share(step, plan), ()) for each in (engine, again))
        assert one == other and not one.skipped, step
