"""The machine's facts and rates as text and as JSON."""

from __future__ import annotations

import json

from tasks.contracts import HardwareProfile, Rates
from tasks.paths import rates_file

GB = 1e9


def document(profile: HardwareProfile, rates: Rates | None) -> str:
    """One JSON document: the profile, or with rates an object of `hardware` and `rates`."""
    if rates is None:
        return profile.to_json().rstrip("\n")
    both = {"hardware": profile.model_dump(mode="json"), "rates": rates.model_dump(mode="json")}
    return json.dumps(both, indent=2, sort_keys=True, ensure_ascii=False)


def lines(profile: HardwareProfile, rates: Rates | None) -> list[str]:
    found = [f"device    {profile.device}"]
    for index, gpu in enumerate(profile.gpus):
        major, minor = gpu.compute_capability
        found.append(
            f"gpu {index}     {gpu.name}, {gpu.memory_bytes / 2**30:.1f} GiB, compute capability {major}.{minor}"
        )
    for link in profile.links:
        lanes = f" ({link.nvlinks} lanes)" if link.nvlinks else ""
        found.append(f"link      gpu {link.a} - gpu {link.b}: {link.kind}{lanes}")
    found += [
        f"cpu       {profile.cpu_name}, {profile.cpu_cores} cores",
        f"memory    {profile.host_memory_bytes / 2**30:.1f} GiB ({profile.host_memory_source})",
        f"/dev/shm  {profile.shm_bytes / 2**30:.1f} GiB",
    ]
    found += [f"note      {note}" for note in profile.notes]
    return found + (_rates(rates) if rates else [])


def _rates(rates: Rates) -> list[str]:
    found = [f"rates     {rates_file(rates.identity)}"]
    found += [f"matmul    {shape}: {flops / 1e12:.3g} TFLOP/s" for shape, flops in rates.matmul_flops.items()]
    found.append(
        f"memory    {rates.memory_bandwidth / GB:.1f} GB/s, host {rates.host_memory_bandwidth / GB:.1f} GB/s"
    )
    if rates.host_to_device and rates.device_to_host:
        found.append(
            f"pcie      to the GPU {rates.host_to_device / GB:.1f} GB/s, back {rates.device_to_host / GB:.1f} GB/s"
        )
    found.append(f"disk      read {rates.disk_read / GB:.2f} GB/s, write {rates.disk_write / GB:.2f} GB/s")
    for name, curves in (("reduce", rates.all_reduce), ("gather", rates.all_gather)):
        for ranks, points in curves.items():
            said = ", ".join(f"{_size(size)} {seconds * 1e3:.3g} ms" for size, seconds in points)
            found.append(f"{name}    {ranks} ranks: {said}")
    return found + [f"note      {note}" for note in rates.notes]


def _size(number: int) -> str:
    return f"{number / 2**20:.0f} MiB" if number >= 2**20 else f"{number / 2**10:.0f} KiB"
