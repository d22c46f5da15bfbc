"""One rank of an agreement run of `benchmarks.native_gpu`: a few steps on given rows, every step's loss and norm told.

Started by torchrun: `python -m benchmarks.native_agree REQUEST.json RESULT.json`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.native_variants import ROWS
from tasks.contracts import Contract
from tasks.stage import die_with_parent
from tasks.trainer.engine import Batch
from tasks.trainer.mesh import data_rank, joined
from tasks.trainer.torch_engine import TorchEngine
from tasks.trainer.trial import TrialRequest, random_model

SEED = 0
WORDS = 200  # different tokens in the rows, so that there is something to learn in a few steps


class Told(Contract):
    """Per step the mean loss of the learnt tokens, and the gradient's norm."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]


def rows_of(step: int, length: int) -> Batch:
    """All rows of a step; each learns another number of tokens, and no row repeats."""
    draw = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(WORDS, (ROWS, length), generator=draw)
    labels = ids.clone()
    for number, row in enumerate(labels):
        row[: 1 + number * length // (2 * ROWS)] = -100
    return Batch(ids, labels)


def shares(whole: Batch, request: TrialRequest) -> list[Batch]:
    """The micro-batches of this rank."""
    plan = request.plan
    first = data_rank(plan, dist.get_rank()) * plan.accumulation
    parts = range(first, first + plan.accumulation)
    cut = [slice(part * plan.micro_batch, (part + 1) * plan.micro_batch) for part in parts]
    return [Batch(whole.input_ids[part], whole.labels[part]) for part in cut]


def train(request: TrialRequest) -> Told:
    assert request.plan.global_batch == ROWS
    engine = TorchEngine(
        random_model(request, SEED), request.train, request.plan, request.precision, 100, SEED
    )
    results = []
    for step in range(request.steps):
        whole = rows_of(step, request.sequence)
        targets = int((whole.labels[:, 1:] != -100).sum())
        results.append(engine.train_step(shares(whole, request), targets, ()))
    return Told(
        losses=tuple(result.loss for result in results), norms=tuple(result.grad_norm for result in results)
    )


def main(arguments: Sequence[str]) -> None:
    die_with_parent()
    request = TrialRequest.read(Path(arguments[0]))
    with joined(request.plan, timedelta(minutes=3)):
        told = train(request)
        if dist.get_rank() == 0:
            told.write(Path(arguments[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
