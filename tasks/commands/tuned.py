"""Which tuned model a command works with: what was trained last, a registered version, or a step of the run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tasks.contracts import BaseModelRef, DataManifest, Resolved
from tasks.errors import UserError
from tasks.params import Params
from tasks.paths import Paths
from tasks.registry import find_registered
from tasks.run_key import run_key
from tasks.stage import heartbeat


@contextmanager
def tuned_folder(params: Params, paths: Paths, version: str | None) -> Iterator[Path]:
    """A folder with what `checkpoints/final/` holds; a registered version's is gone afterwards.

    Args:
        version: `models:/name/3` or `models:/name@alias`; None is `checkpoints/final/` itself.

    Raises:
        UserError: no such version, or its files are not in MLflow's store.
    """
    if version is None:
        yield paths.final
        return
    found = find_registered(params.register_, paths, version)
    from mlflow.artifacts import download_artifacts
    from mlflow.exceptions import MlflowException

    with tempfile.TemporaryDirectory(prefix="elastane-") as fetched:
        with heartbeat(f"fetching {found.name} version {found.version}"):
            try:
                download_artifacts(f"models:/{found.name}/{found.version}", dst_path=fetched)
            except (MlflowException, OSError) as error:
                raise UserError(
                    f"the files of {version} cannot be fetched ({str(error).splitlines()[0]}); name another version"
                ) from None
        manifests = sorted(Path(fetched).rglob("manifest.json"))
        if not manifests:
            raise UserError(f"{version} holds no model of elastane; name another version")
        yield manifests[0].parent


@contextmanager
def step_folder(params: Params, paths: Paths, step: int) -> Iterator[Path]:
    """What `checkpoints/final/` would hold had the run of this recipe ended at a step; it is gone afterwards.

    Raises:
        UserError: no checkpoint of that step is kept.
    """
    from tasks.trainer.adapters import attach_adapters
    from tasks.trainer.checkpoint import complete_checkpoints
    from tasks.trainer.finish import Learned, describe
    from tasks.trainer.parallelize import count_parameters
    from tasks.trainer.run_state import StepLog
    from tasks.trainer.training_state import export

    base = BaseModelRef.read(paths.base_ref)
    key = run_key(params, DataManifest.read(paths.manifest), base)
    run = paths.run(key)
    kept = {manifest.step: path for path, manifest in complete_checkpoints(run)}
    if step not in kept:
        there = f"those of steps {', '.join(map(str, kept))}" if kept else "none"
        raise UserError(
            f"--step {step} has no checkpoint: run {key} of this recipe keeps {there} (train.keep_checkpoints); "
            "name another step, or leave --step out"
        )
    precision = Resolved.read(run / "resolved.json").precision
    with tempfile.TemporaryDirectory(prefix="elastane-") as folder:
        model = attach_adapters(_without_numbers(base, paths), params.train, params.seed)
        export(model, params.train, precision, kept[step], Path(folder))
        records = StepLog(run).read()[:step]
        describe(Path(folder), Learned(key, params.train, precision, records, count_parameters(model)), base)
        yield Path(folder)


def _without_numbers(base: BaseModelRef, paths: Paths) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    trusted = base.trust_remote_code
    config = AutoConfig.from_pretrained(paths.base, trust_remote_code=trusted)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trusted)
