"""Whether a card that is plainly there can be used: the kernel's traces of it, the driver, torch's CUDA."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from tasks.probe.host import read_text

# The oldest driver of each CUDA's major version (NVIDIA, CUDA compatibility: minor version compatibility).
OLDEST_DRIVER = {11: "450", 12: "525", 13: "580"}


def torch_version() -> str:
    """The installed torch's version by its metadata, without importing it; "" if there is none."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def torch_cuda() -> int | None:
    """Major version of the CUDA that the installed torch is built for; None without CUDA, or if it does not say."""
    local = re.search(r"\+cu(\d+)\d$", torch_version())
    if local:
        return int(local.group(1))
    if "+" in torch_version() or not torch_version():
        return None
    for requirement in requires("torch") or ():
        found = re.match(
            r"nvidia-cuda-runtime-cu(\d+)|(?:nvidia-cuda-runtime|cuda-toolkit)\b[^=]*==(\d+)", requirement
        )
        if found:
            return int(found.group(1) or found.group(2))
    return None


def card_seen(root: Path) -> str | None:
    """The path below `root` by which the kernel shows that an NVIDIA card or its driver is there."""
    for folder, pattern in (("dev", "nvidia[0-9]*"), ("proc/driver/nvidia/gpus", "*")):
        first = min((root / folder).glob(pattern), default=None)
        if first is not None:
            return f"/{first.relative_to(root)}"
    return "/proc/driver/nvidia" if (root / "proc/driver/nvidia").is_dir() else None


def kernel_driver(root: Path) -> str | None:
    """The version of the kernel's driver module."""
    found = re.search(
        r"Kernel Module\s+(?:for \S+\s+)?(\d[\d.]*)", read_text(root / "proc/driver/nvidia/version")
    )
    return found.group(1) if found else None


def too_old(driver_cuda: int | None, torch_needs: int | None) -> str | None:
    """A reason if a driver for CUDA `driver_cuda` (major) cannot run a torch built for `torch_needs`."""
    if driver_cuda is None or torch_needs is None or driver_cuda >= torch_needs:
        return None
    oldest = OLDEST_DRIVER.get(torch_needs)
    return (
        f"the driver is too old: it knows CUDA {driver_cuda}, and this torch is built for CUDA {torch_needs}"
        + (f", which needs driver {oldest} or newer" if oldest else "")
    )


def unusable(where: str, problem: str, driver: str | None) -> str:
    """The sentence that stops the probe rather than let a card lie idle."""
    return (
        f"an NVIDIA card is here ({where}), but it cannot be used: {problem} (driver {driver or 'unknown'}, "
        f"torch {torch_version() or 'absent'}); update the driver or install a torch built for it, or set "
        "probe_hardware.device=cpu to run on the CPU"
    )
