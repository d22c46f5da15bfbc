"""The training loop: which samples, when to save, what to log. The same under every Plan."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from tqdm import tqdm

from tasks.contracts import CheckpointManifest, Plan, Precision
from tasks.data.order import MicroBatch, SampleOrder, deal
from tasks.data.prepared import Split
from tasks.errors import PREEMPTED_EXIT_CODE
from tasks.params import TrainParams
from tasks.stage import lively
from tasks.trainer.checkpoint import load_newest, save_checkpoint
from tasks.trainer.engine import Batch, Engine, StepResult
from tasks.trainer.guards import StopSignals, check_finite
from tasks.trainer.mesh import data_rank
from tasks.trainer.performance import Stopwatch
from tasks.trainer.run_state import StepLog, StepRecord
from tasks.trainer.tracking import Tracker


@dataclass(frozen=True)
class Job:
    """One run on this rank: everything the loop needs and nothing that the engine hides."""

    run: Path
    run_key: str
    plan: Plan
    precision: Precision
    train: TrainParams
    split: Split
    order: SampleOrder
    total_steps: int
    rank: int


class Lengths:
    """Token counts of every row, read once."""

    def __init__(self, split: Split) -> None:
        self.tokens: NDArray[np.int64] = split.lengths()
        self.targets: NDArray[np.int64] = split.target_counts()


def collate(split: Split, micro: MicroBatch) -> Batch:
    """Pads a micro-batch on the right to its longest row (id 0, label -100)."""
    rows = [split.tokens(row) for row in micro.rows]
    longest = max(len(ids) for ids, _ in rows)
    ids = np.zeros((len(rows), longest), dtype=np.int64)
    labels = np.full((len(rows), longest), -100, dtype=np.int64)
    for line, (row_ids, row_labels) in enumerate(rows):
        ids[line, : len(row_ids)] = row_ids
        if micro.counted:
            labels[line, : len(row_labels)] = row_labels
    return Batch(torch.from_numpy(ids), torch.from_numpy(labels))


def train_loop(
    engine: Engine, job: Job, lengths: Lengths, signals: StopSignals, tracker: Tracker | None
) -> Stopwatch:
    """Trains from the newest checkpoint (or the start) to the last step; saves at the end.

    Raises:
        SystemExit: with code 75 after SIGTERM or SIGUSR1, once the state is saved.
    """
    loaded = load_newest(engine, job.run, job.run_key)
    first = loaded.step if loaded else 0
    log = StepLog(job.run)
    if job.rank == 0:
        log.cut(first)
    watch = Stopwatch()
    bar = tqdm(
        total=job.total_steps,
        initial=first,
        desc="train",
        unit="step",
        disable=job.rank != 0,
        file=sys.stderr,
        mininterval=0.5 if sys.stderr.isatty() else 2,
        dynamic_ncols=True,
    )
    saved_at = time.monotonic()
    for step in range(first, job.total_steps):
        due = time.monotonic() - saved_at >= job.train.checkpoint_every_seconds and job.rank == 0
        samples = job.order.samples(step)
        begin = time.perf_counter()
        with lively(bar):
            result = _one_step(engine, job, lengths, watch, samples, (due, signals.received is not None))
        check_finite(result.loss, result.grad_norm, step, job.precision)
        tokens = int(lengths.tokens[samples].sum())
        watch.count(tokens)
        if job.rank == 0:
            seconds = time.perf_counter() - begin
            record = _record(step, samples, tokens, int(lengths.targets[samples].sum()), seconds, result)
            log.append(record)
            _show(bar, tracker, record, watch.tokens / watch.wall())
        save, stop = result.flags
        last = step + 1 == job.total_steps
        if save or stop or last:
            _save(engine, job, step + 1)
            saved_at = time.monotonic()
        if stop and not last:
            bar.close()
            raise SystemExit(PREEMPTED_EXIT_CODE)
    bar.close()
    return watch


def _one_step(
    engine: Engine,
    job: Job,
    lengths: Lengths,
    watch: Stopwatch,
    samples: NDArray[np.int64],
    flags: tuple[bool, bool],
) -> StepResult:
    begin = time.perf_counter()
    plan = job.plan
    share = data_rank(plan, job.rank)
    micros = deal(samples.tolist(), lengths.tokens, plan.micro_batch, plan.data_parallel, share)
    batches = [collate(job.split, micro) for micro in micros]
    watch.data_wait += time.perf_counter() - begin
    return engine.train_step(batches, int(lengths.targets[samples].sum()), flags)


def _record(
    step: int, samples: NDArray[np.int64], tokens: int, targets: int, seconds: float, result: StepResult
) -> StepRecord:
    return StepRecord(
        step=step + 1,
        loss=result.loss,
        grad_norm=result.grad_norm,
        learning_rate=result.learning_rate,
        tokens=tokens,
        target_tokens=targets,
        seconds=seconds,
        samples=tuple(samples.tolist()),
    )


def _show(bar: tqdm, tracker: Tracker | None, record: StepRecord, rate: float) -> None:
    bar.set_postfix_str(f"loss {record.loss:.3f}, {rate:,.0f} tokens/s", refresh=False)
    bar.update()
    if tracker:
        tracker.log(
            record.step,
            {
                "train_loss": record.loss,
                "grad_norm": record.grad_norm,
                "learning_rate": record.learning_rate,
                "tokens_per_second": rate,
            },
        )


def _save(engine: Engine, job: Job, step: int) -> None:
    manifest = CheckpointManifest(
        run_key=job.run_key,
        step=step,
        samples_seen=job.order.samples_seen(step),
        world_size=dist.get_world_size(),
        plan=job.plan,
    )
    save_checkpoint(engine, job.run, manifest, job.train.keep_checkpoints)
