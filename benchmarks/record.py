"""Writes a benchmark's figures with what they were measured on."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "peft", "datasets", "dvc", "prefect", "mlflow")


def hardware() -> dict[str, Any]:
    """CPU cores, host memory and GPUs of this machine."""
    import psutil
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "machine": platform.machine(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus,
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write(name: str, figures: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Writes `<folder>/<name>.json`: date, hardware, versions, command and the figures."""
    path = folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "versions": versions(),
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        **figures,
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path
