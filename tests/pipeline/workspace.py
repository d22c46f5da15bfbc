"""A whole workspace for pipeline tests: this repository's files, a tiny model and tiny rows, DVC and git of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests import tiny

RECIPE = {
    "prepare_data.source": "data/raw/rows.json",
    "prepare_data.max_length": 160,
    "prepare_data.validation_fraction": 0.2,
    "prepare_data.near_duplicate_threshold": 1.0,
    "train.global_batch": 8,
    "train.num_train_epochs": 4,
    "train.learning_rate": 0.01,
    "train.lora.rank": 4,
    "train.checkpoint_every_seconds": 0.2,
    "evaluate.max_rows": 8,
    "evaluate.samples": 2,
    "evaluate.max_new_tokens": 6,
}


@dataclass(frozen=True)
class Workspace:
    root: Path
    recipe: dict[str, Any] = field(default_factory=lambda: dict(RECIPE))

    @property
    def environment(self) -> dict[str, str]:
        binaries = str(Path(sys.executable).parent)
        return {**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}", "PYTHONPATH": ""}

    def run(self, *command: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Runs a command of the environment in this workspace; its exit code is the caller's to judge."""
        return subprocess.run(
            command,
            cwd=self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def must(self, *command: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        done = self.run(*command, timeout=timeout)
        assert done.returncode == 0, (
            f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done

    def change(self, **changes: Any) -> None:
        """Changes params.yaml by dotted keys, keeping earlier changes."""
        self.recipe.update(changes)
        tiny.write_params(self.root, **self.recipe)

    def weights(self) -> dict[str, Any]:
        folder = self.root / "checkpoints" / "final"
        return {
            name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()
        }

    def copy(self, root: Path) -> Workspace:
        """The same workspace elsewhere, with its DVC cache, runs and stores."""
        shutil.copytree(self.root, root, symlinks=True)
        return Workspace(root, dict(self.recipe))


def make_workspace(root: Path, **changes: Any) -> Workspace:
    """Copies the repository's files and adds model, rows, git and DVC state."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=tiny.REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    for name in listed:
        source = tiny.REPOSITORY / name
        if source.is_file() and not name.startswith(("tests/", "benchmarks/results/", "docs/")):
            target = root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    tiny.write_rows(root / "data" / "raw" / "rows.json")
    tiny.write_model(root / "tiny-model")
    workspace = Workspace(root)
    workspace.change(**{"model.name_or_path": "tiny-model", **changes})
    workspace.must("git", "init", "-q")
    workspace.must("dvc", "add", "-q", "data/raw/rows.json")
    workspace.must("git", "add", "-A")
    workspace.must("git", "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "start")
    return workspace
