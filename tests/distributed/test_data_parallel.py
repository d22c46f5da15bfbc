"""torch's DataParallel learns what one process learns: one process, its rows dealt out over the cards it drives.

The cards are pretended (see two_cards.py); on real ones it is run by tests/gpu/test_data_parallel.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tasks import train as stage
from tasks import trials
from tasks.contracts import Plan, Resolved, TrainPerformance
from tasks.paths import Paths
from tasks.trainer.data_parallel import shares
from tasks.trainer.engine import Batch
from tasks.trainer.run_state import StepLog
from tasks.trainer.trial import TrialRequest, TrialResult, run_trial
from tasks.trainer.worker import WorkerOrder
from tests import tiny
from tests.distributed import two_cards
from tests.distributed.claims import _join
from tests.distributed.compare import assert_same, start_weights, workspace
from tests.distributed.ranks import Trained, _train_rank, run_ranks, train
from tests.distributed.test_packing import pack
from tests.unit.planner_cases import gpus

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


SLOW = [pytest.param(method, marks=pytest.mark.slow) for method in ("lora", "qlora")]


@pytest.mark.parametrize("method", ["full", *SLOW])
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
        "three": one_process(2, 1, "full"),
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


# --- started as one process ---------------------------------------------------------------------


ON_GPUS = one_process(4).model_copy(update={"device": "cuda", "backend": "nccl"})


def request(root: Path, plan: Plan) -> TrialRequest:
    return TrialRequest(
        config=str(root / "model" / "config.json"),
        plan=plan,
        train=tiny.params().train,
        precision="float32",
        sequence=16,
        mean_row=8,
        document=4,
        steps=1,
    )


def try_it(root: str, result: str) -> None:
    two_cards.pretend()
    _join(one_process())
    run_trial(request(Path(root), one_process())).write(Path(result))


def test_a_trial_of_it_trains_packed_rows(tmp_path: Path) -> None:
    tiny.write_model(tmp_path / "model")
    run_ranks(1, try_it, str(tmp_path), str(tmp_path / "result.json"))
    result = TrialResult.read(tmp_path / "result.json")
    assert result.failed is None and result.seconds is not None and result.plan.name == "dataparallel2"


@pytest.mark.parametrize("what", ["train", "trial"])
def test_one_process_is_started_with_all_cores(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []

    class Ended:
        stderr, returncode = "", 1

        def wait(self) -> int:
            return 0

    def start(command: list[str], env: dict[str, str], **options: object) -> Ended:
        started.append((command, env))
        return Ended()

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    hardware = gpus(4).model_copy(update={"cpu_cores": 12})
    if what == "train":
        monkeypatch.setattr(stage.subprocess, "Popen", start)
        stage.launch(ON_GPUS, hardware, Path("runs/x"), Paths(tmp_path))
    else:
        monkeypatch.setattr(trials.subprocess, "run", start)
        trials._launch(request(tmp_path, ON_GPUS), hardware)
    ((command, environment),) = started
    assert "--nproc-per-node=1" in command and environment["OMP_NUM_THREADS"] == "12"
