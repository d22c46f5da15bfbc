"""The visible GPUs and their links, through NVML."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pynvml

from tasks.contracts import Gpu, Link
from tasks.probe.driver import too_old, torch_cuda
from tasks.probe.visible import Card, Shown, visible

# GeForce cards of the 40 series have no peer access, and some drivers deny it too late (deepspeedai/DeepSpeed#4433,
# NVIDIA/nccl-tests#117).
NO_PEERS = re.compile(r"GeForce RTX 40\d\d")


@dataclass(frozen=True)
class Gpus:
    """`problem` says why no card can be used, if one should be there."""

    driver: str | None = None
    gpus: tuple[Gpu, ...] = ()
    links: tuple[Link, ...] = ()
    notes: tuple[str, ...] = ()
    problem: str | None = None


def read_gpus(environment: Mapping[str, str]) -> Gpus:
    """The GPUs that `environment` leaves visible."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Gpus(problem=f"NVML says {error}")
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        slices = [_slices(handle) for handle in handles]
        cards = [
            Card(_uuid(handle), parts is not None, tuple(_uuid(part) for part in parts or ()))
            for handle, parts in zip(handles, slices, strict=True)
        ]
        shown, notes = visible(environment.get("CUDA_VISIBLE_DEVICES"), cards)
        gpus = tuple(_gpu(handles[device.card], _slice(slices, device)) for device in shown)
        links = tuple(
            _link(a, b, handles[shown[a].card], handles[shown[b].card])
            for a in range(len(shown))
            for b in range(a + 1, len(shown))
        )
        problem = too_old(_driver_cuda(), torch_cuda()) if cards else "NVML lists no card"
        said = (*notes, *mixed_note(gpus, environment), *peers_note(gpus, environment))
        return Gpus(pynvml.nvmlSystemGetDriverVersion(), gpus, links, said, problem)
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


def peers_note(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> tuple[str, ...]:
    """A hint for cards that may hang in their first collective."""
    without = sorted({gpu.name for gpu in gpus if NO_PEERS.search(gpu.name)})
    if len(gpus) < 2 or not without or environment.get("NCCL_P2P_DISABLE") == "1":
        return ()
    return (
        f"{', '.join(without)} has no peer access, and NCCL can hang at full load over it: set NCCL_P2P_DISABLE=1 "
        "if training stands still (`elastane probe --measure` tries an all-reduce)",
    )


def _driver_cuda() -> int | None:
    """Major version of the newest CUDA that the driver knows."""
    try:
        return int(pynvml.nvmlSystemGetCudaDriverVersion()) // 1000
    except pynvml.NVMLError:
        return None


def _uuid(handle: object) -> str:
    try:
        return str(pynvml.nvmlDeviceGetUUID(handle))
    except pynvml.NVMLError:
        return ""


def _slices(handle: object) -> list[object] | None:
    """Handles of the slices of a card in MIG mode; None for a card that is not."""
    try:
        if pynvml.nvmlDeviceGetMigMode(handle)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return None
    except pynvml.NVMLError:
        return None  # this card knows no MIG
    parts = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            parts.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
        except pynvml.NVMLError:
            continue  # no slice in this place
    return parts


def _slice(slices: Sequence[list[object] | None], device: Shown) -> object | None:
    parts = slices[device.card]
    return parts[device.slice] if parts is not None and device.slice is not None else None


def _gpu(card: object, part: object | None) -> Gpu:
    """The card, or its slice: then with the slice's name and memory."""
    name = pynvml.nvmlDeviceGetName(card if part is None else part)
    return Gpu(
        name=name if part is None or "MIG" in name else f"{name} MIG slice",
        memory_bytes=pynvml.nvmlDeviceGetMemoryInfo(card if part is None else part).total,
        compute_capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(card)),
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
