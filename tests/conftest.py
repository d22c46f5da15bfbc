"""What all tests share: nothing leaves the machine, nothing touches the user's caches."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.update(
    {
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DVC_NO_ANALYTICS": "true",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "TOKENIZERS_PARALLELISM": "false",
        "ELASTANE_CACHE": tempfile.mkdtemp(prefix="elastane-test-cache-"),
    }
)
for name in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL", "PREFECT_HOME"):
    os.environ.pop(name, None)
# `git`, `dvc` and `python` of stages are those of this environment.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For matrices so small that threads would mostly wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A tiny workspace after one `elastane run`. Tests copy it before they change anything."""
    from tests.pipeline.workspace import make_workspace

    workspace = make_workspace(tmp_path_factory.mktemp("pipeline") / "workspace")
    done = workspace.must("elastane", "run", "--json", timeout=400)
    (workspace.root.parent / "first-run.json").write_text(done.stdout)
    (workspace.root.parent / "first-run.log").write_text(done.stderr)
    yield workspace
