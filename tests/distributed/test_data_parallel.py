"""torch's DataParallel learns what one process learns: one process, its rows dealt out over the cards it drives.

The cards are pretended (see two_cards.py); on real ones it is run by tests/gpu/test_data_parallel.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tasks.contracts import Plan, Resolved, TrainPerformance
from tasks.trainer.data_parallel import shares
from tasks.trainer.engine import Batch
from tasks.trainer.run_state import StepLog
from tasks.trainer.worker import WorkerOrder
from tests import tiny
from tests.distributed import two_cards
from tests.distributed.compare import assert_same, start_weights, workspace
from tests.distributed.ranks import Trained, _train_rank, run_ranks, train
from tests.distributed.test_packing import pack

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("one_thread")]

SINGLE = tiny.cpu_plan(1, 2, 4)


def one_process(gpus: int = 2, micro: int = 2, level: str = "none") -> Plan:
    plan = tiny.cpu_plan(gpus, micro, 8 // (gpus * micro), level)
    return plan.model_copy(update={"replication": "data_parallel"})


def work(root: str, run_keys: list[str], stops: list[int | None]) -> None:
    two_cards.pretend()
    for run_key, stop in zip(run_keys, stops, strict=True):
        _train_rank(root, run_key, stop)


def under(
    root: Path, plans: dict[str, Plan], stop_at: int | None = None, fresh: bool = True
) -> list[Trained]:
    """Trains under each plan, in one process for all of them."""
    for key, plan in plans.items():
        if fresh:
            shutil.rmtree(root / "runs" / key, ignore_errors=True)
        (root / "runs" / key).mkdir(parents=True, exist_ok=True)
        WorkerOrder(
            run_key=key, plan=plan, resolved=Resolved(precision="float64", token_budget=None), starts=1
        ).write(root / "runs" / key / "order.json")
    code = 75 if stop_at is not None else 0
    run_ranks(1, work, str(root), list(plans), [stop_at] * len(plans), code=code)
    return [Trained(root / "runs" / key, StepLog(root / "runs" / key).read()) for key in plans]


@pytest.mark.parametrize("method", ["full", "lora", pytest.param("qlora", marks=pytest.mark.slow)])
def test_it_learns_what_one_process_learns(method: str, tmp_path: Path) -> None:
    """Short last steps included, and under every level of recomputing."""
    changes = {
        "train.num_train_epochs": 1,
        "train.learning_rate": 0.003,
        "train.finetuning_type": method,
    }
    root = workspace(tmp_path / "w", {"hidden": 128} if method == "qlora" else None, **changes)
    one = train(root, tiny.params(), SINGLE, "float64", run_key="one")
    plans = {
        "two": one_process(),
        "three": one_process(2, 1, "selective"),
        "four": one_process(4, 2, "full"),
    }
    for other in under(root, plans):
        assert_same(one, other, start_weights(root), loss=1e-9, moved=1e-9)
        report = TrainPerformance.read(other.run / "finished" / "train_performance.json")
        assert len(report.ranks) == 1 and report.plan.replication == "data_parallel"


def test_packed_rows(tmp_path: Path) -> None:
    root = workspace(tmp_path / "w", **{"train.num_train_epochs": 1, "train.global_batch": 4})
    pack(root)
    one = train(root, tiny.params(), tiny.cpu_plan(1, 2, 2), "float64", run_key="one")
    (two,) = under(root, {"two": one_process(2, 1, "full")})
    assert_same(one, two, start_weights(root), loss=1e-9, moved=1e-9, clip=0.0)


def test_a_run_goes_on_under_it_and_after_it(tmp_path: Path) -> None:
    root = workspace(tmp_path / "w", **{"train.finetuning_type": "full", "train.learning_rate": 0.003})
    one = train(root, tiny.params(), SINGLE, "float64", run_key="one")
    train(root, tiny.params(), tiny.cpu_plan(2, 2, 2), "float64", run_key="x", stop_at=2)
    under(root, {"x": one_process()}, stop_at=5, fresh=False)
    last = train(root, tiny.params(), tiny.cpu_plan(1, 2, 2, shards=2), "float64", run_key="x", fresh=False)
    assert_same(one, last, start_weights(root), loss=1e-9, moved=1e-9)


def test_rows_are_dealt_out_evenly() -> None:
    ids = torch.arange(10).view(5, 2)
    parts = shares(Batch(ids, ids + 1, ids + 2), 2)
    assert [len(part.input_ids) for part in parts] == [3, 2]
    assert torch.equal(torch.cat([part.input_ids for part in parts]), ids)
    assert all(torch.equal(part.input_ids + 1, part.labels) for part in parts)
    assert all(
        part.positions is not None and torch.equal(part.input_ids + 2, part.positions) for part in parts
    )
    (alone,) = shares(Batch(ids[:1], ids[:1]), 2)
    assert len(alone.input_ids) == 1 and alone.positions is None
