"""What the machine is."""

from __future__ import annotations

from typing import Literal

from tasks.contracts.base import Contract, Count, Degree


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


class Fabric(Contract):
    """The network between nodes: `bytes_per_second` one way, a node, as the data sheet states it."""

    name: str
    bytes_per_second: float


class Rates(Contract):
    """Rates measured on this machine; None or empty where it could not be. They stay out of every DVC out.

    `matmul_flops` maps "MxKxN precision" to FLOP/s of one GPU (of all cores on a CPU). `all_reduce` and `all_gather`
    map the number of ranks to (message bytes, seconds) points; a gather's message is the gathered whole. Bandwidths
    are bytes/s; those of memory count bytes read and bytes written. `notes` say what could not be measured, and why.
    """

    identity: str
    torch: str
    matmul_flops: dict[str, float]
    memory_bandwidth: float
    host_to_device: float | None
    device_to_host: float | None
    host_memory_bandwidth: float
    disk_read: float
    disk_write: float
    all_reduce: dict[int, tuple[tuple[int, float], ...]]
    all_gather: dict[int, tuple[tuple[int, float], ...]]
    notes: tuple[str, ...] = ()


class Corrections(Contract):
    """Measured over predicted seconds of a step by method, precision and checkpointing, learnt from trials."""

    identity: str
    factors: dict[str, float]


class HardwareProfile(Contract):
    """Stable facts of this machine, or of `nodes` such machines; `gpus` and `links` are those of one node.

    Measured rates live in a cache keyed by `identity`.
    """

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
    nodes: Degree = 1
    fabric: Fabric | None = None

    @property
    def gpu_count(self) -> int:
        """GPUs of all nodes."""
        return len(self.gpus) * self.nodes

    @property
    def identity(self) -> str:
        from hashlib import sha256

        return sha256(self.to_json().encode()).hexdigest()[:16]
