"""The end of a run: export, manifest and reports, whole below runs/<RunKey>/finished/."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch.distributed as dist

from tasks.contracts import (
    BaseModelRef,
    FinalManifest,
    RankPerformance,
    TrainReport,
    write_text,
)
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
    for weights in final.glob("*.safetensors"):
        weights.chmod(0o644)
    content = weights_hash(final)
    base = BaseModelRef.read(paths.base_ref)
    _name_base(final, base)
    FinalManifest(
        run_key=job.run_key,
        content_hash=content,
        finetuning_type=job.train.finetuning_type,
        base=base,
        embeddings_trained=job.train.finetuning_type != "full" and job.train.lora.train_embeddings,
    ).write(final / "manifest.json")
    _report(engine, job, content, records).write(final / "train_report.json")
    write_curves(records, final / "train_curves.csv")
    measured = [rank for rank in ranks if rank is not None]
    train_performance(job, paths, measured, records, starts).write(finished / "train_performance.json")
    (finished / "complete").touch()


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


def _report(engine: Engine, job: Job, content: str, records: list[StepRecord]) -> TrainReport:
    trainable, total = engine.parameter_counts()
    return TrainReport(
        run_key=job.run_key,
        content_hash=content,
        precision=job.precision,
        steps=len(records),
        samples_seen=sum(len(record.samples) for record in records),
        tokens=sum(record.tokens for record in records),
        target_tokens=sum(record.target_tokens for record in records),
        first_loss=records[0].loss,
        final_loss=records[-1].loss,
        trainable_parameters=trainable,
        total_parameters=total,
    )
