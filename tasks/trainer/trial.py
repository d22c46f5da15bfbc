"""A few steps of a plan on random weights of the model's true shape, to measure what the planner predicts.

Started by torchrun, one process a rank: `python -m tasks.trainer.trial REQUEST.json RESULT.json`.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.contracts import Contract, Plan, Precision
from tasks.params import TrainParams
from tasks.stage import die_with_parent
from tasks.trainer.mesh import joined

if TYPE_CHECKING:
    from tasks.trainer.engine import Batch
    from tasks.trainer.weights import MetaModel

WARM_UP = 2


class TrialRequest(Contract):
    """One plan to try. `config` is a model's config.json; rows are `mean_row` tokens, one step's `sequence`.

    Packed rows hold documents of `document` tokens.
    """

    config: str
    plan: Plan
    train: TrainParams
    precision: Precision
    sequence: int
    mean_row: int
    document: int | None = None
    steps: int


class TrialResult(Contract):
    """Seconds of the median step and peak bytes a rank; `failed` says why there are none."""

    plan: Plan
    seconds: float | None
    peak_bytes: int | None
    failed: str | None


def run_trial(request: TrialRequest) -> TrialResult:
    """Trains `request.steps` steps in this process (a rank of a process group where the plan has several)."""
    import torch

    try:
        with tempfile.TemporaryDirectory(prefix="elastane-nvme-", ignore_cleanup_errors=True) as swap:
            return _measure(request, Path(swap))
    except torch.OutOfMemoryError:
        return TrialResult(plan=request.plan, seconds=None, peak_bytes=None, failed="ran out of GPU memory")


def _measure(request: TrialRequest, swap: Path) -> TrialResult:
    import torch

    from tasks.trainer.engines import make_engine
    from tasks.trainer.performance import peak_memory

    plan = request.plan
    base = random_model(request, 0)
    vocab = base.model.config.vocab_size
    engine = make_engine(base, request.train, plan, request.precision, 100, 0, swap)
    del base
    cuda = plan.device == "cuda"
    if cuda:
        gc.collect()
        torch.cuda.empty_cache()  # of matrices that were drawn whole
        torch.cuda.reset_peak_memory_stats()
    # The longest rows first: they decide the peak, and all shapes are warm afterwards.
    lengths = [request.sequence, *[request.mean_row] * (WARM_UP - 1 + request.steps)]
    taken = []
    for length in lengths:
        batches = [_batch(plan.rows, length, vocab, request.document) for _ in range(plan.accumulation)]
        targets = plan.global_batch * (length - 1)
        if cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        engine.train_step(batches, targets, ())
        taken.append(time.perf_counter() - begin)  # train_step reads the loss, so the device has caught up
    engine.close()
    peak = peak_memory(plan) if cuda else None
    return TrialResult(plan=plan, seconds=statistics.median(taken[WARM_UP:]), peak_bytes=peak, failed=None)


def random_model(request: TrialRequest, seed: int) -> MetaModel:
    """The model of the config, whose weights will be drawn where they train."""
    from transformers import AutoConfig

    from tasks.trainer.loading import DTYPES, meta_model, stored_precision
    from tasks.trainer.weights import MetaModel, RandomWeights

    described = json.loads(Path(request.config).read_text(encoding="utf-8"))
    config = AutoConfig.for_model(described.pop("model_type"), **described)
    model = meta_model(config, DTYPES[stored_precision(request.train.finetuning_type, request.precision)])
    return MetaModel(model, RandomWeights(model, seed))


def _batch(rows: int, length: int, vocab: int, document: int | None) -> Batch:
    import torch

    from tasks.trainer.engine import Batch

    ids: torch.Tensor = torch.randint(vocab, (rows, length))
    positions = torch.arange(length).remainder(document).expand(rows, length) if document else None
    return Batch(ids, ids, positions)


def main(arguments: Sequence[str]) -> None:
    """Joins torchrun's group, runs the trial, and lets rank 0 write the result."""
    die_with_parent()
    request = TrialRequest.read(Path(arguments[0]))
    with joined(request.plan, timedelta(minutes=5)):
        result = run_trial(request)
        if os.environ["RANK"] == "0":
            result.write(Path(arguments[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
