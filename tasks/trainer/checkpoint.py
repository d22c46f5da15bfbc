"""Resumable checkpoints: folders below runs/<RunKey>/checkpoints that count once their manifest is there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch.distributed as dist

from tasks.contracts import CheckpointManifest
from tasks.trainer.engine import Engine

MANIFEST = "manifest.json"


def checkpoints_folder(run: Path) -> Path:
    return run / "checkpoints"


def complete_checkpoints(run: Path) -> list[tuple[Path, CheckpointManifest]]:
    """Complete checkpoints of a run, oldest first. Half-written ones have no manifest and are left out."""
    found = [
        (path, CheckpointManifest.read(path / MANIFEST))
        for path in checkpoints_folder(run).glob("step-*")
        if (path / MANIFEST).is_file()
    ]
    return sorted(found, key=lambda item: item[1].step)


def save_checkpoint(engine: Engine, run: Path, manifest: CheckpointManifest, keep: int) -> None:
    """Collective. Every rank writes its part beside; rank 0 adds the manifest, then gives it its name.

    A kill at any moment leaves the older checkpoints whole. Keeps the newest `keep`.
    """
    final = checkpoints_folder(run) / f"step-{manifest.step:08d}"
    writing = final.with_name(f".{final.name}")
    if (final / MANIFEST).is_file():
        return
    if dist.get_rank() == 0:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
    dist.barrier()
    engine.save(writing)
    dist.barrier()
    if dist.get_rank() == 0:
        for file in writing.iterdir():
            _sync(file)
        manifest.write(writing / MANIFEST)
        writing.rename(final)
        _sync(final.parent)
        for old, _ in complete_checkpoints(run)[:-keep]:
            shutil.rmtree(old)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_newest(engine: Engine, run: Path, run_key: str) -> CheckpointManifest | None:
    """Restores the newest complete checkpoint of this RunKey into `engine`; None when there is none."""
    usable = [item for item in complete_checkpoints(run) if item[1].run_key == run_key]
    if not usable:
        return None
    path, manifest = usable[-1]
    engine.load(path)
    return manifest
