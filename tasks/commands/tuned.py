"""Which tuned model a command works with: what was trained last, or a registered version."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.errors import UserError
from tasks.params import Params
from tasks.paths import Paths
from tasks.registry import find_registered
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
