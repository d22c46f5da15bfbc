"""One rank of a run, started by torchrun: `python -m tasks.trainer.worker` in the workspace."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.contracts import BaseModelRef, Contract, Plan, Resolved, write_text
from tasks.errors import USER_ERROR_EXIT_CODE, UserError
from tasks.params import Params, read_params
from tasks.paths import Paths
from tasks.stage import die_with_parent, heartbeat, say
from tasks.trainer.guards import StopSignals, hold_as_worker
from tasks.trainer.mesh import joined

if TYPE_CHECKING:
    import torch

    from tasks.trainer.weights import MetaModel

COLLECTIVE_TIMEOUT = timedelta(minutes=10)


class WorkerOrder(Contract):
    """runs/<RunKey>/order.json: what the train stage asks of its workers."""

    run_key: str
    plan: Plan
    resolved: Resolved
    starts: int


def main() -> None:
    """Trains this rank's part; a user's mistake ends with code 2 and its sentence in the run folder."""
    die_with_parent()
    signals = StopSignals()
    paths = Paths.here()
    run = paths.run(sys.argv[1])
    held = hold_as_worker(run)
    try:
        train_rank(read_params(paths.params), paths, run, signals)
    except UserError as error:
        # Mostly all ranks say the same; what one alone met is said where no other has spoken.
        if os.environ.get("RANK", "0") == "0" or not (run / "user_error").exists():
            write_text(run / "user_error", str(error))
        sys.exit(USER_ERROR_EXIT_CODE)
    finally:
        held.close()


def train_rank(params: Params, paths: Paths, run: Path, signals: StopSignals) -> None:
    """Sets up the process group, trains, exports. Needs torchrun's variables."""
    rank = int(os.environ["RANK"])
    order = WorkerOrder.read(run / "order.json")
    if rank == 0:
        with heartbeat("loading torch and transformers"):
            _import_libraries()
    else:
        _import_libraries()
    with joined(order.plan, COLLECTIVE_TIMEOUT):
        _train(params, paths, run, order, rank, signals)


def _import_libraries() -> None:
    import peft  # noqa: F401
    import torch  # noqa: F401
    import transformers  # noqa: F401


def _train(
    params: Params, paths: Paths, run: Path, order: WorkerOrder, rank: int, signals: StopSignals
) -> None:
    from tasks.data.order import SampleOrder
    from tasks.data.packing import training_rows
    from tasks.trainer.engines import make_engine
    from tasks.trainer.finish import finish
    from tasks.trainer.loading import loaded_dtype
    from tasks.trainer.loop import Job, Lengths, train_loop
    from tasks.trainer.performance import GpuWatch, rank_performance
    from tasks.trainer.tracking import Tracker

    split = training_rows(paths.prepared)
    lengths = Lengths(split)
    samples = SampleOrder.of(params, lengths.tokens)
    steps = samples.steps(params.train.num_train_epochs, lengths.tokens, order.resolved.token_budget)
    precision, plan = order.resolved.precision, order.plan
    if rank == 0:
        say(f"training {steps} steps of {params.global_batch} samples in {precision}, plan {plan.name}")
    kept = loaded_dtype(params.train.finetuning_type, precision)
    # Nothing else holds on to what it was made from.
    base = _open_base(paths, kept, rank)
    swap = params.select_strategy.nvme_path
    swap = run / "nvme" if swap is None else paths.root / swap
    engine = make_engine(base, params.train, plan, precision, steps, params.seed, swap)
    del base
    job = Job(run, order.run_key, plan, precision, params.train, split, samples, steps, rank)
    tracker = Tracker(params, paths, order.run_key, plan) if rank == 0 else None
    gpu = GpuWatch(plan)
    watch = train_loop(engine, job, lengths, signals, tracker)
    mine = rank_performance(rank, plan, watch, engine.clock(), gpu.mean())
    finish(engine, job, paths, mine, order.starts)
    if tracker:
        tracker.close()
    engine.close()


def _open_base(paths: Paths, dtype: torch.dtype | None, rank: int) -> MetaModel:
    """The base. Ranks that run its own code wait for rank 0, which copies that to where all import it from."""
    import torch.distributed as dist

    from tasks.trainer.loading import open_base

    own_code = BaseModelRef.read(paths.base_ref).trust_remote_code
    if own_code and rank > 0:
        dist.barrier()
    base = open_base(paths, dtype)
    if own_code and rank == 0:
        dist.barrier()
    return base


if __name__ == "__main__":
    main()
