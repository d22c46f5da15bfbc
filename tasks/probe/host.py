"""Memory, cores and shared memory of the host, as far as this process may use them."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

MIB = 2**20
# What a rank can take of /dev/shm: NCCL's buffers to two neighbours (segments of 32 MiB are in its error reports), and
# for every data worker two batches that wait, of up to 16 MiB (a few images at full resolution).
NCCL_BYTES = 64 * MIB
BATCH_BYTES = 16 * MIB
BATCHES_WAITING = 2
DATA_WORKERS = 4  # a usual number for a rank; one that reads its rows by itself needs none


def host_memory(root: Path) -> tuple[int, Literal["cgroup", "physical"]]:
    """Bytes this process may use: the least limit of its cgroups, or all the machine has."""
    physical = _memory_total(root)
    limits = [
        int(text)
        for folder in _cgroup_folders(root, "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
        if (text := read_text(folder / name)).isdigit()  # version 2 says "max" for no limit
    ]
    least = min(limits, default=physical)
    return (least, "cgroup") if least < physical else (physical, "physical")


def cpu_cores(root: Path, usable: int) -> int:
    """Cores to count on: those this process may run on, or its cgroups' quota if that is less."""
    quotas = [usable]
    for folder in _cgroup_folders(root, "cpu"):
        version_2 = read_text(folder / "cpu.max").split()
        version_1 = [read_text(folder / "cpu.cfs_quota_us"), read_text(folder / "cpu.cfs_period_us")]
        for said in (version_2, version_1):
            if len(said) == 2 and said[0].isdigit() and said[1].isdigit() and int(said[1]):
                quotas.append(max(1, int(said[0]) // int(said[1])))
    return min(quotas)


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_name(root: Path) -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", read_text(root / "proc/cpuinfo"), re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def shm_bytes(root: Path) -> int:
    """Size of shared memory, which data workers and NCCL use; 0 where there is none."""
    try:
        size = os.statvfs(root / "dev/shm")
    except OSError:
        return 0
    return size.f_blocks * size.f_frsize


def _memory_total(root: Path) -> int:
    found = re.search(r"^MemTotal:\s*(\d+) kB", read_text(root / "proc/meminfo"), re.MULTILINE)
    if found:
        return int(found.group(1)) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """This process's cgroup and those above it, in version 1 and 2 hierarchies.

    In a container the path may be the host's and not be there; its top then is the container's own.
    """
    mount = root / "sys/fs/cgroup"
    for line in read_text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            tops = [mount, mount / "unified"]
        elif controller in controllers.split(","):
            tops = [mount / controllers, mount / controller]
        else:
            continue
        inner = [part for part in Path(path.lstrip("/")).parts if part != ".."]
        for top in tops:
            for depth in range(len(inner), -1, -1):
                yield top.joinpath(*inner[:depth])


def read_text(path: Path) -> str:
    """The file's text, stripped; "" if it cannot be read, as kernels differ in what files they have."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def shm_note(shm: int, ranks: int, workers: int, nccl: bool) -> tuple[str, ...]:
    """A note where `shm` bytes are less than `ranks` ranks with `workers` data workers each can need."""
    needed = ranks * ((NCCL_BYTES if nccl and ranks > 1 else 0) + workers * BATCHES_WAITING * BATCH_BYTES)
    if shm >= needed or not shm:  # systems without /dev/shm share memory in other ways
        return ()
    return (
        f"/dev/shm holds {shm / MIB:.0f} MiB, and {ranks} rank(s) with {workers} data workers each can need "
        f"{needed / MIB:.0f} MiB; start the container with --shm-size=1g or --ipc=host, or use fewer workers",
    )
