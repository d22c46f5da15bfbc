"""The end of a run: export, manifest and reports, whole below runs/<RunKey>/finished/."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from tasks.contracts import (
    BaseModelRef,
    FinalManifest,
    Precision,
    RankPerformance,
    TrainReport,
    write_text,
)
from tasks.params import TrainParams
from tasks.paths import Paths
from tasks.trainer.checkpoint import complete_checkpoints
from tasks.trainer.engine import Engine
from tasks.trainer.loop import Job
from tasks.trainer.model_source import weights_hash
from tasks.trainer.performance import train_performance
from tasks.trainer.run_state import StepLog, StepRecord, write_curves


def finish(engine: Engine, job: Job, paths: Paths, mine: RankPerformance, starts: int) -> None:
    """Collective. Rank 0 writes; the file `complete` comes last, and without it nothing counts."""
    ranks: list[RankPerformance | None] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    finished = job.run / "finished"
    final = finished / "final"
    if job.rank == 0:
        shutil.rmtree(finished, ignore_errors=True)
        final.mkdir(parents=True)
    dist.barrier()
    engine.export(final, complete_checkpoints(job.run)[-1][0])
    dist.barrier()
    if job.rank != 0:
        return
    records = StepLog(job.run).read()
    base = BaseModelRef.read(paths.base_ref)
    describe(final, Learned(job.run_key, job.train, job.precision, records, engine.parameter_counts()), base)
    measured = [rank for rank in ranks if rank is not None]
    train_performance(job, paths, measured, records, starts).write(finished / "train_performance.json")
    (finished / "complete").touch()


@dataclass(frozen=True)
class Learned:
    """What is said of exported weights: the run, the steps that made them, and (trainable, all) parameters."""

    run_key: str
    train: TrainParams
    precision: Precision
    records: list[StepRecord]
    parameters: tuple[int, int]


def describe(final: Path, learned: Learned, base: BaseModelRef) -> None:
    """Writes manifest, report and curves beside the exported weights in `final`."""
    for weights in final.glob("*.safetensors"):
        weights.chmod(0o644)
    content, train = weights_hash(final), learned.train
    _name_base(final, base)
    FinalManifest(
        run_key=learned.run_key,
        content_hash=content,
        finetuning_type=train.finetuning_type,
        base=base,
        embeddings_trained=train.finetuning_type != "full" and train.lora.train_embeddings,
    ).write(final / "manifest.json")
    _report(learned, content).write(final / "train_report.json")
    write_curves(learned.records, final / "train_curves.csv")


def _name_base(final: Path, base: BaseModelRef) -> None:
    """An adapter names its base as the user did, not by the folder it was loaded from here."""
    file = final / "adapter_config.json"
    if not file.is_file():
        return
    config = json.loads(file.read_text(encoding="utf-8"))
    config |= {"base_model_name_or_path": base.name_or_path, "revision": base.commit or base.revision}
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()  # PEFT writes a set, so in another order each time
    write_text(file, json.dumps(config, indent=2, sort_keys=True) + "\n")


def _report(learned: Learned, content: str) -> TrainReport:
    records, (trainable, total) = learned.records, learned.parameters
    return TrainReport(
        run_key=learned.run_key,
        content_hash=content,
        precision=learned.precision,
        steps=len(records),
        samples_seen=sum(len(record.samples) for record in records),
        tokens=sum(record.tokens for record in records),
        target_tokens=sum(record.target_tokens for record in records),
        first_loss=records[0].loss,
        final_loss=records[-1].loss,
        trainable_parameters=trainable,
        total_parameters=total,
    )
