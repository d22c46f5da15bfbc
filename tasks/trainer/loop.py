"""The training loop: which samples, when to save, what to log. The same under every Plan."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from tqdm import tqdm

from tasks.contracts import CheckpointManifest, HardwareProfile, Plan, Precision
from tasks.data.order import MicroBatch, SampleOrder, deal
from tasks.data.packing import PackedSplit, Rows, width
from tasks.errors import PREEMPTED_EXIT_CODE
from tasks.params import TrainParams
from tasks.paths import Paths
from tasks.stage import lively, say
from tasks.trainer.checkpoint import load_newest, save_checkpoint
from tasks.trainer.engine import Batch, Engine, StepResult
from tasks.trainer.guards import StopSignals, check_finite
from tasks.trainer.live import Board, Reporter
from tasks.trainer.mesh import data_rank
from tasks.trainer.performance import Stopwatch, Yardstick, shares
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
    split: Rows
    order: SampleOrder
    total_steps: int
    rank: int

    @property
    def paths(self) -> Paths:
        """The workspace that the run's folder is in."""
        return Paths(self.run.parents[1])

    @property
    def attended(self) -> float | None:
        """Tokens of the document that an average token is in; None where a row is one."""
        return self.split.attended() if isinstance(self.split, PackedSplit) else None


class Lengths:
    """Token counts of every row, read once."""

    def __init__(self, split: Rows) -> None:
        self.tokens: NDArray[np.int64] = split.lengths()
        self.targets: NDArray[np.int64] = split.target_counts()


def collate(split: Rows, micro: MicroBatch) -> Batch:
    """Pads a micro-batch on the right to its longest row (id 0, label -100), packs to a width that returns."""
    rows = [split.tokens(row) for row in micro.rows]
    longest = max(len(ids) for ids, _ in rows)
    packed = split if isinstance(split, PackedSplit) else None
    if packed is not None:
        longest = width(longest, packed.max_length)
    ids = np.zeros((len(rows), longest), dtype=np.int64)
    labels = np.full((len(rows), longest), -100, dtype=np.int64)
    for line, (row_ids, row_labels) in enumerate(rows):
        ids[line, : len(row_ids)] = row_ids
        if micro.counted:
            labels[line, : len(row_labels)] = row_labels
    positions = None
    if packed is not None:
        positions = torch.from_numpy(
            np.stack([restarting(packed.documents(row), longest) for row in micro.rows])
        )
    return Batch(torch.from_numpy(ids), torch.from_numpy(labels), positions)


def restarting(documents: NDArray[np.int64], tokens: int) -> NDArray[np.int64]:
    """Positions of shape (tokens,) that begin at 0 in each of `documents` (their lengths), and in what is left."""
    lengths = np.append(documents, tokens - documents.sum())
    starts = np.cumsum(lengths) - lengths
    positions: NDArray[np.int64] = np.arange(tokens, dtype=np.int64) - np.repeat(starts, lengths)
    return positions


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
    reporter = Reporter(job.run, job.rank, job.plan, engine, watch)
    board = _board(job) if job.rank == 0 else None
    bar = _bar(job, first)
    saved, saved_at = first, time.monotonic()
    for step in range(first, job.total_steps):
        due = time.monotonic() - saved_at >= job.train.checkpoint_every_seconds and job.rank == 0
        samples = job.order.samples(step)
        begin = time.perf_counter()
        with lively(bar):
            result = _one_step(engine, job, lengths, watch, samples, (due, signals.received is not None))
        check_finite(result.loss, result.grad_norm, step + 1, job.precision, saved)
        if result.skipped and job.rank == 0:
            say(f"step {step + 1} overflowed in float16 and is left out; the loss scale is halved")
        watch.steps += 1
        wrote = reporter.step(step + 1)
        if board is not None:
            record = _record(step, samples, lengths, time.perf_counter() - begin, result)
            log.append(record)
            board.step(lengths.tokens[samples].tolist(), record.seconds)
            if wrote:
                board.read()
            _show(bar, tracker, record, board)
        save, stop = result.flags
        last = step + 1 == job.total_steps
        if save or stop or last:
            _save(engine, job, step + 1, watch)
            saved, saved_at = step + 1, time.monotonic()
        if stop and not last:
            bar.close()
            raise SystemExit(PREEMPTED_EXIT_CODE)
    bar.close()
    if job.rank == 0 and watch.steps:
        say(_split(shares(watch.spent(engine.clock()))))
    return watch


def _board(job: Job) -> Board:
    hardware = HardwareProfile.read(job.paths.hardware)
    method = job.train.finetuning_type
    yardstick = Yardstick(job.paths, hardware, job.plan, job.precision, method, job.attended)
    return Board(job.run, job.plan, yardstick)


def _bar(job: Job, first: int) -> tqdm:
    return tqdm(
        total=job.total_steps,
        initial=first,
        desc="train",
        unit="step",
        disable=job.rank != 0,
        file=sys.stderr,
        mininterval=0.5 if sys.stderr.isatty() else 2,
        dynamic_ncols=True,
    )


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
    micros = deal(samples.tolist(), lengths.tokens, plan.rows, plan.shares, share)
    batches = [collate(job.split, micro) for micro in micros]
    watch.data_wait += time.perf_counter() - begin
    return engine.train_step(batches, int(lengths.targets[samples].sum()), flags)


def _record(
    step: int, samples: NDArray[np.int64], lengths: Lengths, seconds: float, result: StepResult
) -> StepRecord:
    return StepRecord(
        step=step + 1,
        loss=result.loss,
        grad_norm=result.grad_norm,
        learning_rate=result.learning_rate,
        tokens=int(lengths.tokens[samples].sum()),
        target_tokens=int(lengths.targets[samples].sum()),
        seconds=seconds,
        samples=tuple(samples.tolist()),
    )


def _show(bar: tqdm, tracker: Tracker | None, record: StepRecord, board: Board) -> None:
    bar.set_postfix_str(board.text(record.loss), refresh=False)
    bar.update()
    if tracker:
        values = {
            "train_loss": record.loss,
            "grad_norm": record.grad_norm,
            "learning_rate": record.learning_rate,
        }
        tracker.log(record.step, values | board.metrics())


def _split(spent: Mapping[str, float]) -> str:
    """What took over half a percent of the time, the most first."""
    told = sorted((item for item in spent.items() if item[1] >= 0.005), key=lambda item: -item[1])
    return "time of rank 0: " + ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in told)


def _save(engine: Engine, job: Job, step: int, watch: Stopwatch) -> None:
    begin = time.perf_counter()
    manifest = CheckpointManifest(
        run_key=job.run_key,
        step=step,
        samples_seen=job.order.samples_seen(step),
        world_size=dist.get_world_size(),
        plan=job.plan,
    )
    save_checkpoint(engine, job.run, manifest, job.train.keep_checkpoints)
    watch.checkpoint += time.perf_counter() - begin
