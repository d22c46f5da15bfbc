"""torch's DataParallel on two GPUs: the steps of one process on one GPU, whatever is trained and however it rounds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tasks.contracts import HardwareProfile, Plan, Precision
from tasks.params import read_params
from tasks.paths import Paths
from tasks.trainer.engine import Batch
from tasks.trainer.loop import restarting
from tests import tiny
from tests.distributed.claims import SMALL_SCALE, _join
from tests.distributed.compare import workspace
from tests.distributed.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
SINGLE = tiny.cpu_plan(1, 2, 4)
TWO = tiny.cpu_plan(2, 2, 2).model_copy(update={"replication": "data_parallel"})
TOKENS = 32
Step = tuple[float, float, dict[str, torch.Tensor]]
# AdamW makes full steps of gradients near zero; with so large an epsilon it is smooth, and rounding stays rounding.
SMOOTH = {"train.learning_rate": 0.1, "train.adam_epsilon": 1.0}
# Rows meet the same others on a GPU as in one process, so half precision rounds alike: sums of gradients are float32.
CLOSE: dict[Precision, tuple[float, float]] = {
    "float32": (1e-6, 2e-5),
    "bfloat16": (1e-4, 5e-3),
    "float16": (1e-4, 5e-3),
}
CASES: list[tuple[Precision, str, bool]] = [
    ("float32", "none", False),
    ("float32", "full", True),
    ("bfloat16", "full", False),
    ("bfloat16", "none", True),
    ("float16", "full", False),
]


def rows(step: int, packed: bool) -> Batch:
    """Eight rows of unequal lengths and targets; packed ones of three documents each."""
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(3, 259, (8, TOKENS), generator=draw)
    labels = ids.clone()
    lengths = torch.randint(4, TOKENS, (8, 1), generator=draw)
    labels[torch.arange(TOKENS) >= lengths] = -100
    positions = None
    if packed:
        cuts = torch.randint(2, TOKENS // 3, (8, 3), generator=draw).numpy()
        positions = torch.stack([torch.from_numpy(restarting(cut, TOKENS)) for cut in cuts])
    return Batch(ids, labels, positions)


def micros(every: Batch, size: int) -> list[Batch]:
    count = -(-len(every.input_ids) // size)
    positions = [None] * count if every.positions is None else every.positions.split(size)
    parts = zip(every.input_ids.split(size), every.labels.split(size), positions, strict=True)
    return [Batch(*part) for part in parts]


def steps(root: Path, plan: Plan, precision: Precision, packed: bool) -> Iterator[Step]:
    """(loss, gradient norm, gradients by name) of two steps of eight rows, and one of a single row."""
    from tasks.trainer.loading import DTYPES, open_base, stored_precision
    from tasks.trainer.torch_engine import TorchEngine

    params = read_params(root / "params.yaml")
    base = open_base(Paths(root), DTYPES[stored_precision(params.train.finetuning_type, precision)])
    engine = TorchEngine(base, params.train, plan, precision, 10, params.seed)
    engine.loss_scale.scale = SMALL_SCALE
    for step in range(3):
        every = rows(step, packed) if step < 2 else micros(rows(step, packed), 1)[0]
        targets = int((every.labels[:, 1:] != -100).sum())
        result = engine.train_step(micros(every, plan.rows), targets, ())
        assert not result.skipped
        yield result.loss, result.grad_norm, {p.name: p.weight.grad.clone().cpu() for p in engine.pieces}


def agree(folders: list[str], device: str = "cuda") -> None:
    on = {"device": device, "backend": "nccl" if device == "cuda" else "gloo"}
    one, two = SINGLE.model_copy(update=on), TWO.model_copy(update=on)
    _join(one)
    for folder in folders:
        for precision, level, packed in CASES if device == "cuda" else CASES[:2]:
            level_of = {"activation_checkpointing": level}
            told = [
                list(steps(Path(folder), plan.model_copy(update=level_of), precision, packed))
                for plan in (one, two)
            ]
            near, gradient = CLOSE[precision]
            for step, (left, right) in enumerate(zip(*told, strict=True)):
                where = f"{Path(folder).name} {precision} {level} packed={packed} step {step}"
                assert abs(left[0] - right[0]) <= near * left[0], where
                assert abs(left[1] - right[1]) <= gradient * left[1], where
                assert left[2].keys() == right[2].keys()
                for name, value in left[2].items():
                    assert (value - right[2][name]).norm() <= gradient * max(value.norm(), 1e-3), (
                        f"{where} {name}"
                    )
    if device == "cuda":
        assert all(torch.cuda.max_memory_allocated(gpu) > 2**20 for gpu in range(2)), "both GPUs compute"


def test_the_steps_are_those_of_one_process(tmp_path: Path) -> None:
    folders = [
        str(workspace(tmp_path / method, {"hidden": 128}, **{"train.finetuning_type": method}, **SMOOTH))
        for method in ("full", "lora", "qlora")
        if method != "qlora" or _has_bitsandbytes()
    ]
    run_ranks(1, agree, folders)


def _has_bitsandbytes() -> bool:
    from importlib.util import find_spec

    return find_spec("bitsandbytes") is not None


def _worker(root: str, run_key: str) -> None:
    from tasks.trainer import tracking, worker
    from tasks.trainer.guards import StopSignals

    class Nothing:
        def __init__(self, *args: object) -> None: ...
        def log(self, *args: object) -> None: ...
        def close(self, *args: object) -> None: ...

    os.chdir(root)
    tracking.Tracker = Nothing  # type: ignore[assignment, misc]
    paths = Paths(Path(root))
    worker.train_rank(read_params(paths.params), paths, paths.run(run_key), StopSignals())


def test_it_is_certified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole worker: samples dealt out, checkpoint, export, report; weights by the distance they moved."""
    from tasks.commands import certify, certify_runs

    def start(plan: Plan, hardware: HardwareProfile, run: Path, here: Paths) -> tuple[int, str]:
        assert plan.processes == 1
        run_ranks(1, _worker, str(here.root), run.name)
        return 0, ""

    monkeypatch.setattr(certify_runs, "start_workers", start)
    monkeypatch.chdir(tmp_path)
    request = certify.Request(("dataparallel",), tiny=True, family="llama", method="lora")
    proof = certify.run(request)
    assert proof.same, proof
    assert {each.plan: each.status for each in proof.plans} == {"single": "reference", "dataparallel": "same"}
