"""A HardwareProfile as rates: what one rank computes, moves and sends in a second."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tasks.contracts import HardwareProfile, Precision, Rates
from tasks.planner.calibration import CONSUMER, Calibration, calibration_of
from tasks.planner.gpus import gpu_type

# 216 tokens/s of LoRA training of a 135 M model on 2 cores at 85 % efficiency: 4 x 135e6 x 216 / 2 / 0.85 (measured,
# float32; see CPU_ROWS in compute.py).
CPU_FLOPS_PER_CORE = 6.8e10
CPU_BANDWIDTH = 2e10  # bytes/s, assumed: about what one memory channel gives
CPU_HALF_SLOWDOWN = 30  # bfloat16 against float32 in training on such a CPU (measured)
GLOO_BYTES = 1e9
GLOO_LATENCY = 200e-6
ETHERNET_BYTES = 1.25e9  # nodes of a profile that names no fabric: 10 Gbit/s, the modest case
SYSTEM_BYTES = 8e9  # between sockets, or where the link is not known
# Bytes/s of host memory that AdamW on the CPU reaches with 8 cores, where not measured: from 7.6 B parameters stepped
# beside two H200 with 32 cores (benchmarks/results/zero-capped-qwen2.5-7b-full.json).
HOST_BANDWIDTH = 20e9
HOST_CORES = 8
DISK_BYTES = 2e9  # one NVMe disk, assumed where not measured
FLOAT32_MATMUL = 0.7  # of the float32 peak


@dataclass(frozen=True)
class Machine:
    """Rates of one rank, bytes and FLOP a second, one way.

    `peak` is the data sheet's FLOP/s in the precision; `link` joins two GPUs of a node, `fabric` two nodes, whole;
    `fabric` is what a node sends through all its ports. Memory limits are of the smallest card and of one node.
    """

    device: str
    peak: float
    constants: Calibration
    bandwidth: float
    gpus_per_node: int
    nodes: int
    link: float
    fabric: float
    host_link: float
    host_bandwidth: float
    disk: float
    cores: int
    gpu_memory: int
    host_memory: int
    measured: bool = False

    @property
    def world(self) -> int:
        return self.gpus_per_node * self.nodes


def machine(hardware: HardwareProfile, precision: Precision, rates: Rates | None = None) -> Machine:
    """The slowest card counts for all; measured rates stand in for data sheets where there are any."""
    if hardware.device == "cpu":
        return _cpu(hardware, precision)
    kinds = [(gpu, gpu_type(gpu.name, gpu.compute_capability)[0]) for gpu in hardware.gpus]
    slowest = min(kinds, key=lambda pair: pair[1].half)
    gpu, kind = slowest
    constants = calibration_of(gpu.compute_capability, kind.consumer)
    no_units = precision == "bfloat16" and gpu.compute_capability < (8, 0)
    peak = (kind.single if precision == "float32" or no_units else kind.half) * 1e12
    found = Machine(
        device="cuda",
        peak=peak,
        constants=constants,
        bandwidth=min(each.bandwidth for _, each in kinds) * 1e12,
        gpus_per_node=len(hardware.gpus),
        nodes=hardware.nodes,
        link=_link(hardware),
        fabric=hardware.fabric.bytes_per_second if hardware.fabric else ETHERNET_BYTES,
        host_link=min(each.link.pcie_bytes_per_second for _, each in kinds) * 0.8,
        host_bandwidth=HOST_BANDWIDTH * max(1, len(hardware.gpus) // 2, hardware.cpu_cores / HOST_CORES),
        disk=DISK_BYTES,
        cores=hardware.cpu_cores,
        gpu_memory=min(each.memory_bytes for each in hardware.gpus),
        host_memory=hardware.host_memory_bytes,
    )
    return found if rates is None else _measured(found, rates, precision)


def _cpu(hardware: HardwareProfile, precision: Precision) -> Machine:
    flops = CPU_FLOPS_PER_CORE * hardware.cpu_cores / (1 if precision == "float32" else CPU_HALF_SLOWDOWN)
    return Machine(
        device="cpu",
        peak=flops,
        constants=CONSUMER,
        bandwidth=CPU_BANDWIDTH,
        gpus_per_node=1,
        nodes=hardware.nodes,
        link=GLOO_BYTES,
        fabric=hardware.fabric.bytes_per_second if hardware.fabric else GLOO_BYTES,
        host_link=CPU_BANDWIDTH,
        host_bandwidth=CPU_BANDWIDTH,
        disk=DISK_BYTES,
        cores=hardware.cpu_cores,
        gpu_memory=hardware.host_memory_bytes,
        host_memory=hardware.host_memory_bytes,
    )


def _link(hardware: HardwareProfile) -> float:
    """Bytes/s one way between the two worst-joined GPUs of a node."""
    if len(hardware.gpus) == 1:
        return float("inf")
    kinds = [gpu_type(gpu.name, gpu.compute_capability)[0] for gpu in hardware.gpus]
    pcie = min(kind.link.pcie_bytes_per_second for kind in kinds)
    lane = min((kind.link.lane for kind in kinds if kind.link.lane), default=25e9)
    speeds = [
        link.nvlinks * lane
        if link.kind == "nvlink" and link.nvlinks
        else (pcie if link.kind == "pcie" else min(pcie, SYSTEM_BYTES))
        for link in hardware.links
    ]
    return min(speeds, default=min(pcie, SYSTEM_BYTES))


def _measured(found: Machine, rates: Rates, precision: Precision) -> Machine:
    """Rates of the probe in place of data sheets: the best matmul, memory, host link and the largest all-reduce."""
    changes: dict[str, float | Calibration | bool] = {"measured": True}
    constants = found.constants
    best = max(
        (flops for shape, flops in rates.matmul_flops.items() if shape.endswith(precision)), default=0.0
    )
    if best:
        constants = replace(constants, matmul=min(1.0, 1.05 * best / found.peak))
    if rates.memory_bandwidth:
        constants = replace(constants, bandwidth=min(1.0, rates.memory_bandwidth / found.bandwidth))
    curve = rates.all_reduce.get(found.gpus_per_node, ())
    if curve:
        ranks = found.gpus_per_node
        size, taken = max(curve)
        changes["link"] = 2 * (ranks - 1) / ranks * size / taken
        small = min(curve)[1] / (2 * (ranks - 1))
        constants = replace(constants, link=1.0, latency=small)
    if rates.host_to_device and rates.device_to_host:
        changes["host_link"] = min(rates.host_to_device, rates.device_to_host)
    if rates.host_memory_bandwidth:
        changes["host_bandwidth"] = rates.host_memory_bandwidth
    if rates.disk_write:
        changes["disk"] = min(rates.disk_read, rates.disk_write)
    return replace(found, constants=constants, **changes)  # type: ignore[arg-type]
