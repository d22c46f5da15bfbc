"""Stage probe_hardware: facts of this machine that are the same on every run -> hardware.json.

torch is not imported, so that the probe takes less than a second.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import pynvml

from tasks.contracts import Gpu, HardwareProfile, Link
from tasks.errors import UserError
from tasks.params import Params
from tasks.paths import Paths
from tasks.stage import say, stage_main

ROOT = Path("/")


def probe_hardware(params: Params, paths: Paths) -> HardwareProfile:
    """Reads the machine and writes hardware.json.

    Raises:
        UserError: probe_hardware.device=cuda, and no GPU can be used.
    """
    profile = read_machine(params.probe_hardware.device, os.environ, ROOT)
    profile.write(paths.hardware)
    gpus = ", ".join(gpu.name for gpu in profile.gpus) or "no GPU"
    say(f"{gpus}; {profile.cpu_cores} CPU cores, {profile.host_memory_bytes / 2**30:.1f} GiB host memory")
    for note in profile.notes:
        say(f"note: {note}")
    return profile


def read_machine(
    device: Literal["auto", "cuda", "cpu"], environment: Mapping[str, str], root: Path
) -> HardwareProfile:
    """The profile as `device` wishes it; `root` is where /proc, /sys and /dev lie.

    Raises:
        UserError: `device` is cuda, and no GPU can be used.
    """
    driver, gpus, links, notes = (None, (), (), ()) if device == "cpu" else read_gpus(environment)
    if gpus and torch_version().endswith("+cpu"):
        notes = (
            *notes,
            f"torch {torch_version()} is built without CUDA, so the GPUs are not used; install a CUDA build",
        )
        gpus, links = (), ()
    if device == "cuda" and not gpus:
        reason = "; ".join(notes) or "the NVIDIA driver is absent or shows none"
        raise UserError(
            f"probe_hardware.device=cuda, but no GPU can be used ({reason}); mend that or set device to auto or cpu"
        )
    memory, source = host_memory(root)
    return HardwareProfile(
        device="cuda" if gpus else "cpu",
        gpus=gpus,
        links=links,
        driver=driver,
        cpu_name=cpu_name(root),
        cpu_cores=cpu_cores(root, usable_cores()),
        host_memory_bytes=memory,
        host_memory_source=source,
        shm_bytes=shm_bytes(root),
        notes=notes,
    )


def torch_version() -> str:
    """The installed torch's version by its metadata, without importing it; "" if there is none."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


# --- host ---------------------------------------------------------------------------------------


def host_memory(root: Path) -> tuple[int, Literal["cgroup", "physical"]]:
    """Bytes this process may use: the least limit of its cgroups, or all the machine has."""
    physical = _memory_total(root)
    limits = [
        int(text)
        for folder in _cgroup_folders(root, "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
        if (text := _read(folder / name)).isdigit()  # version 2 says "max" for no limit
    ]
    least = min(limits, default=physical)
    return (least, "cgroup") if least < physical else (physical, "physical")


def cpu_cores(root: Path, usable: int) -> int:
    """Cores to count on: those this process may run on, or its cgroups' quota if that is less."""
    quotas = [usable]
    for folder in _cgroup_folders(root, "cpu"):
        version_2 = _read(folder / "cpu.max").split()
        version_1 = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
        for said in (version_2, version_1):
            if len(said) == 2 and said[0].isdigit() and said[1].isdigit() and int(said[1]):
                quotas.append(max(1, int(said[0]) // int(said[1])))
    return min(quotas)


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_name(root: Path) -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _read(root / "proc/cpuinfo"), re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def shm_bytes(root: Path) -> int:
    """Size of shared memory, which data workers and NCCL use; 0 where there is none."""
    try:
        size = os.statvfs(root / "dev/shm")
    except OSError:
        return 0
    return size.f_blocks * size.f_frsize


def _memory_total(root: Path) -> int:
    found = re.search(r"^MemTotal:\s*(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    if found:
        return int(found.group(1)) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """This process's cgroup and those above it, in version 1 and 2 hierarchies.

    In a container the path may be the host's and not be there; its top then is the container's own.
    """
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
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


def _read(path: Path) -> str:
    """The file's text, stripped; "" if it cannot be read, as kernels differ in what files they have."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


# --- GPUs ---------------------------------------------------------------------------------------


def visible_gpus(wish: str | None, uuids: Sequence[str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Indices that CUDA_VISIBLE_DEVICES=`wish` leaves, in its order, and notes.

    As CUDA reads it: indices or beginnings of UUIDs; the first entry that names no GPU ends the list;
    a GPU named twice leaves none.

    Raises:
        UserError: a MIG slice is asked for.
    """
    if wish is None:
        return tuple(range(len(uuids))), ()
    chosen: list[int] = []
    notes: list[str] = []
    for entry in (part.strip() for part in wish.split(",")):
        if entry.startswith("MIG-"):
            raise UserError(
                f"CUDA_VISIBLE_DEVICES={wish} names a MIG slice, and this version uses whole GPUs; give GPU indices"
            )
        index = _gpu_index(entry, uuids)
        if index is None:
            if entry not in ("", "-1"):
                notes.append(
                    f"CUDA_VISIBLE_DEVICES={wish}: {entry} names no GPU here; it and what follows is hidden"
                )
            break
        chosen.append(index)
    if len(set(chosen)) < len(chosen):
        return (), (f"CUDA_VISIBLE_DEVICES={wish} names a GPU twice, and CUDA then shows none",)
    if not chosen and not notes:
        notes.append(f"CUDA_VISIBLE_DEVICES={wish!r} hides all {len(uuids)} GPUs")
    return tuple(chosen), tuple(notes)


def _gpu_index(entry: str, uuids: Sequence[str]) -> int | None:
    if entry.isdigit():
        return int(entry) if int(entry) < len(uuids) else None
    found = [index for index, uuid in enumerate(uuids) if entry.startswith("GPU-") and uuid.startswith(entry)]
    return found[0] if len(found) == 1 else None


def read_gpus(
    environment: Mapping[str, str],
) -> tuple[str | None, tuple[Gpu, ...], tuple[Link, ...], tuple[str, ...]]:
    """Driver, visible GPUs, their links and notes through NVML; nothing without a driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None, (), (), ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
        visible, notes = visible_gpus(environment.get("CUDA_VISIBLE_DEVICES"), uuids)
        shown = [handles[index] for index in visible]
        gpus = tuple(_gpu(handle) for handle in shown)
        links = tuple(
            _link(a, b, shown[a], shown[b]) for a in range(len(shown)) for b in range(a + 1, len(shown))
        )
        return pynvml.nvmlSystemGetDriverVersion(), gpus, links, notes + mixed_note(gpus, environment)
    finally:
        pynvml.nvmlShutdown()


def mixed_note(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> tuple[str, ...]:
    kinds = sorted({f"{gpu.name} ({gpu.memory_bytes / 2**30:.0f} GiB)" for gpu in gpus})
    if len(kinds) < 2:
        return ()
    note = f"GPUs differ: {', '.join(kinds)}; the smallest and slowest counts for all"
    if environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        note += "; indices are by PCI bus here, so set CUDA_DEVICE_ORDER=PCI_BUS_ID when you choose by index"
    return (note,)


def _gpu(handle: object) -> Gpu:
    return Gpu(
        name=pynvml.nvmlDeviceGetName(handle),
        memory_bytes=pynvml.nvmlDeviceGetMemoryInfo(handle).total,
        compute_capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
    )


def _link(a: int, b: int, first: object, second: object) -> Link:
    """NVLink if the driver allows peer access over it, else by the nearest common bridge."""
    try:
        status = pynvml.nvmlDeviceGetP2PStatus(first, second, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except pynvml.NVMLError:
        status = None
    if status == pynvml.NVML_P2P_STATUS_OK:
        return Link(a=a, b=b, kind="nvlink", nvlinks=_nvlinks(first, second))
    try:
        level = pynvml.nvmlDeviceGetTopologyCommonAncestor(first, second)
    except pynvml.NVMLError:
        return Link(a=a, b=b, kind="unknown", nvlinks=0)
    return Link(a=a, b=b, kind="system" if level >= pynvml.NVML_TOPOLOGY_SYSTEM else "pcie", nvlinks=0)


def _nvlinks(first: object, second: object) -> int:
    """Lanes straight to the other GPU; where switches join them, the lanes of the one that has fewer."""
    bus = pynvml.nvmlDeviceGetPciInfo(second).busId
    straight = sum(remote == bus for remote in _remote_ends(first))
    return straight or min(len(_remote_ends(first)), len(_remote_ends(second)))


def _remote_ends(handle: object) -> list[object]:
    ends = []
    for lane in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            if pynvml.nvmlDeviceGetNvLinkState(handle, lane) == pynvml.NVML_FEATURE_ENABLED:
                ends.append(_remote_bus(handle, lane))
        except pynvml.NVMLError:
            break  # this card has no such lane
    return ends


def _remote_bus(handle: object, lane: int) -> object:
    """The bus id at the lane's other end, or None where a virtual machine hides it."""
    try:
        return pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, lane).busId
    except pynvml.NVMLError:
        return None


def main() -> None:
    def run(params: Params, paths: Paths) -> None:
        probe_hardware(params, paths)

    stage_main("probe_hardware", run)


if __name__ == "__main__":
    main()
