"""DDP's communication hooks on two gloo ranks: what they round, that they learn, and that a checkpoint carries them."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tasks.trainer.clock import StepClock
from tasks.trainer.comm_hooks import PowerSgd, communication_hook
from tests import tiny
from tests.distributed.compare import weights, workspace
from tests.distributed.ranks import run_ranks, train

pytestmark = pytest.mark.distributed

WIDTH, ROWS = 48, 32
FIRST = 2  # PowerSGD's first step here; the shipped one would leave these short runs to plain sums


def _net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    return torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1], torch.nn.Tanh(), layers[2])


def _rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's inputs and what a fixed linear map makes of them."""
    draw = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    inputs = torch.randn(ROWS, WIDTH, generator=draw)
    teacher = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(7)) / WIDTH**0.5
    return inputs, inputs @ teacher


class Trainer:
    """DDP in small buckets, so that there are several and that the first step's differ from the later ones."""

    def __init__(self, hook: str) -> None:
        self.net = DistributedDataParallel(_net(), bucket_cap_mb=0.02, gradient_as_bucket_view=True)
        group = self.net.process_group
        self.state = PowerSgd(group, first=FIRST) if hook == "powersgd" else None
        chosen = (self.state, PowerSgd.reduce) if self.state else communication_hook(hook, group)
        self.clock = StepClock(self.net, False, chosen)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)

    def step(self, number: int) -> float:
        self.clock.start()
        self.optimizer.zero_grad(set_to_none=True)
        inputs, targets = _rows(number)
        loss = (self.net(inputs) - targets).square().mean()
        loss.backward()
        self.clock.reduced()
        self.optimizer.step()
        self.clock.stop()
        return loss.item()

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: weight.grad.clone() for name, weight in self.net.module.named_parameters()}

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: weight.detach().clone() for name, weight in self.net.module.named_parameters()}


def _first_gradients(hook: str) -> dict[str, torch.Tensor]:
    trainer = Trainer(hook)
    trainer.step(0)
    return trainer.gradients()


def _round() -> None:
    dist.init_process_group("gloo")
    exact = _first_gradients("none")
    for hook, bits in (("fp16", 10), ("bf16", 7)):
        rounded = _first_gradients(hook)
        for name, gradient in exact.items():
            assert not torch.equal(rounded[name], gradient), (hook, name)
            # Each rank's half of the mean is rounded (half a unit in the last place, relative to itself), and the sum.
            both = [torch.empty_like(gradient) for _ in range(2)]
            dist.all_gather(both, rounded[name])
            assert torch.equal(*both), "ranks disagree"
            assert (rounded[name] - gradient).abs().max() <= 2.0**-bits * gradient.abs().max() * 2, (
                hook,
                name,
            )


def test_half_precision_hooks_round_and_no_more() -> None:
    run_ranks(2, _round)


def _learn() -> None:
    dist.init_process_group("gloo")
    losses = {}
    for hook in ("none", "powersgd"):
        trainer = Trainer(hook)
        said = [trainer.step(step) for step in range(60)]
        losses[hook] = (sum(said[:3]) / 3, sum(said[-3:]) / 3)
        if hook == "powersgd":
            weights = trainer.weights()
            saved = trainer.state.inner.compression_stats()[0]
            error = max(value.abs().max() for value in trainer.state.inner.error_dict.values())
    assert losses["none"][1] < 0.3 * losses["none"][0]
    assert losses["powersgd"][1] < 0.4 * losses["powersgd"][0]
    assert saved > 5, "matrices of 48 x 48 as products of width 2 are 12 times smaller"
    assert error > 0
    for name, weight in weights.items():
        both = [torch.empty_like(weight) for _ in range(2)]
        dist.all_gather(both, weight)
        assert torch.equal(*both), name


def test_powersgd_learns_what_it_compresses() -> None:
    run_ranks(2, _learn)


def _resume(folder: str, stop: int, steps: int) -> None:
    dist.init_process_group("gloo")
    whole = Trainer("powersgd")
    for step in range(steps):
        whole.step(step)
    stopped = Trainer("powersgd")
    for step in range(stop):
        stopped.step(step)
    stopped.state.save(Path(folder), stopped.net.module.named_parameters())
    weights, moments = deepcopy((stopped.net.module.state_dict(), stopped.optimizer.state_dict()))
    dist.barrier()
    for remembers in (True, False):
        resumed = Trainer("powersgd")
        resumed.net.module.load_state_dict(weights)
        resumed.optimizer.load_state_dict(deepcopy(moments))
        if remembers:
            resumed.state.load(Path(folder), resumed.net.module.named_parameters())
        else:
            resumed.state.inner.iter = stop
        for step in range(stop, steps):
            resumed.step(step)
        equal = [torch.equal(value, resumed.weights()[name]) for name, value in whole.weights().items()]
        # Without its memory a run goes another way, if there was something to remember.
        assert all(equal) if remembers or stop <= FIRST else not any(equal), (remembers, equal)


@pytest.mark.parametrize("stop", [1, FIRST, 5])
def test_powersgd_resumes_bit_for_bit_although_its_buckets_change(tmp_path: Path, stop: int) -> None:
    run_ranks(2, _resume, str(tmp_path), stop, 8)


def _other_ranks(folder: str, saving: bool) -> None:
    dist.init_process_group("gloo")
    trainer = Trainer("powersgd")
    if saving:
        for step in range(5):
            trainer.step(step)
        trainer.state.save(Path(folder), trainer.net.module.named_parameters())
        mean = dict(trainer.state._errors)
        for error in mean.values():
            dist.all_reduce(error)
        return
    trainer.state.load(Path(folder), trainer.net.module.named_parameters())
    files = [torch.load(file, weights_only=True) for file in sorted(Path(folder).glob("*.pt"))]
    assert len(files) == 2 and trainer.state.inner.iter == 5
    for name, parameter in trainer.net.module.named_parameters():
        expected = (files[0]["errors"][name] + files[1]["errors"][name]) / 2
        assert torch.equal(trainer.state._errors[parameter], expected)
    assert any(value.any() for value in trainer.state._errors.values())
    trainer.step(5)
    assert all(weight.isfinite().all() for weight in trainer.weights().values())


def test_other_ranks_share_the_mean_of_what_was_not_sent(tmp_path: Path) -> None:
    run_ranks(2, _other_ranks, str(tmp_path), True)
    run_ranks(3, _other_ranks, str(tmp_path), False)


def _timed() -> None:
    dist.init_process_group("gloo")
    for hook in ("none", "fp16", "bf16", "powersgd"):
        trainer = Trainer(hook)
        for step in range(4):
            trainer.step(step)
        totals = trainer.clock.totals
        assert all(totals[kind] > 0 for kind in ("forward", "backward", "communication", "optimizer")), hook


def test_the_clock_sees_communication_through_every_hook() -> None:
    run_ranks(2, _timed)


def test_a_run_under_powersgd_learns_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    # 16 steps, of which PowerSGD compresses 6; the matrices of an adapter this small would be sent whole.
    recipe = {
        "train.finetuning_type": "full",
        "train.learning_rate": 0.003,
        "train.num_train_epochs": 4,
        "train.checkpoint_every_seconds": 1000,
    }
    root = workspace(tmp_path / "w", **recipe, **{"train.communication_hook": "powersgd"})
    plan = tiny.cpu_plan(2, 2, 2)
    whole = train(root, tiny.params(), plan, run_key="whole")
    exact = train(workspace(tmp_path / "exact", **recipe), tiny.params(), plan)
    losses = [record.loss for record in whole.records]
    assert losses[:1] == [exact.records[0].loss], "the first loss is before any exchange"
    assert losses[-1] != exact.records[-1].loss
    assert losses[-1] < losses[0] - 0.5 * (exact.records[0].loss - exact.records[-1].loss)
    stopped = train(root, tiny.params(), plan, run_key="resumed", stop_at=13)
    assert len(stopped.records) < len(losses)
    resumed = train(root, tiny.params(), plan, run_key="resumed", fresh=False)
    assert [record.loss for record in resumed.records] == losses
    expected = weights(whole)
    assert all(torch.equal(value, expected[name]) for name, value in weights(resumed).items())
