"""The params.yaml of a replay, and the files that it names as they were when the version was registered."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tasks.contracts import BaseModelRef
from tasks.paths import Paths
from tasks.stage import heartbeat, say

NAMES_FILES = (("prepare_data", "source"), ("model", "name_or_path"))


def write_params(registered: Path, base: BaseModelRef, original: Paths, replay: Paths) -> None:
    """Writes the replay's params.yaml from the registered one, and puts the files that it names in place.

    A file comes from git's commit, else from DVC's cache or remote at that commit, else from the original
    workspace as it is now, which is said. A hub id is taken at the commit that `base` was fetched at. Curves
    go to a store of the replay's own, so the registered run's page stays as it is.
    """
    yaml = YAML()
    raw: dict[str, Any] = yaml.load(registered.read_text(encoding="utf-8"))
    for section, key in NAMES_FILES:
        raw[section][key] = _placed(raw[section][key], f"{section}.{key}", original, replay)
    if base.commit:
        raw["model"]["revision"] = base.commit
    raw["register"]["tracking_uri"] = f"sqlite:///{replay.mlflow_db}"
    with replay.params.open("w", encoding="utf-8") as file:
        yaml.dump(raw, file)


def _placed(said: str, key: str, original: Paths, replay: Paths) -> str:
    """`said`, or the path in the original workspace if the registered file is kept nowhere."""
    path = Path(said).expanduser()
    if (replay.root / path).exists() and not path.is_absolute():
        return said
    pointer = _pointer(replay.root, path)
    if pointer is not None and _from_dvc(pointer, original, replay) and (replay.root / path).exists():
        return said
    now = original.root / path
    if not now.exists():
        return said
    why = "DVC has lost it" if pointer else "neither git nor DVC keeps it"
    say(f"reproduce: {key}={said} is taken as it is now, since {why}")
    return str(now)


def _pointer(root: Path, path: Path) -> Path | None:
    """The .dvc file that keeps `path` or a folder around it, relative to `root`."""
    if path.is_absolute():
        return None
    names = [place.with_name(f"{place.name}.dvc") for place in (path, *path.parents) if place.name]
    return next((name for name in names if (root / name).is_file()), None)


def _from_dvc(pointer: Path, original: Paths, replay: Paths) -> bool:
    """Brings what `pointer` names into the replay, from the original's cache or, failing that, its remote."""
    home = next(
        (place for place in (original.root, *original.root.parents) if (place / ".dvc").is_dir()), None
    )
    if home is None:
        return False
    cache = _dvc(original.root, "cache", "dir").stdout.strip()
    local = home / ".dvc" / "config.local"
    if local.is_file():
        # Where a remote's password stands; git does not carry it.
        place = replay.root / os.path.relpath(home, original.root) / ".dvc"
        shutil.copyfile(local, place / local.name)
    with heartbeat(f"fetching what {pointer} names, as it was registered, from DVC"):
        _dvc(replay.root, "config", "--local", "cache.dir", cache)
        return any(not _dvc(replay.root, how, str(pointer)).returncode for how in ("checkout", "pull"))


def _dvc(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dvc", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
