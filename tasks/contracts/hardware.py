"""What the machine is."""

from __future__ import annotations

from typing import Literal

from tasks.contracts.base import Contract, Count


class Gpu(Contract):
    """One visible GPU. Memory in bytes as the driver states it."""

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]


class Link(Contract):
    """How two visible GPUs (indices) are joined; `nvlinks` counts active NVLink lanes."""

    a: int
    b: int
    kind: Literal["nvlink", "pcie", "system", "unknown"]
    nvlinks: Count


class HardwareProfile(Contract):
    """Stable facts of this machine. Measured rates live in a cache keyed by `identity`."""

    device: Literal["cuda", "cpu"]
    gpus: tuple[Gpu, ...]
    links: tuple[Link, ...]
    driver: str | None
    cpu_name: str
    cpu_cores: int
    host_memory_bytes: int
    host_memory_source: Literal["cgroup", "physical"]
    shm_bytes: int
    notes: tuple[str, ...]

    @property
    def identity(self) -> str:
        from hashlib import sha256

        return sha256(self.to_json().encode()).hexdigest()[:16]
