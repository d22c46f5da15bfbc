"""Measures what this machine reaches: matrix products, memory, host link, disk, collectives.

The result is cached by the machine's identity (which holds the driver's version) and torch's version.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tasks.commands.measure_links import Curves, measure_links
from tasks.contracts import HardwareProfile, Rates
from tasks.errors import UserError
from tasks.paths import rates_file
from tasks.planner.gpus import gpu_type
from tasks.probe.driver import torch_version
from tasks.probe.rates import cached_rates
from tasks.stage import heartbeat, say

Shape = tuple[int, int, int]
KIB, MIB = 2**10, 2**20
# (tokens, d_in, d_out) of linear layers, from small models and micro-batches to large ones.
GPU_SHAPES: tuple[Shape, ...] = (
    (128, 1024, 1024),
    (512, 2048, 2048),
    (512, 4096, 4096),
    (2048, 2048, 5632),
    (2048, 4096, 4096),
    (4096, 4096, 11008),
    (8192, 4096, 14336),
    (8192, 8192, 8192),
)
CPU_SHAPES: tuple[Shape, ...] = (
    (64, 576, 576),
    (64, 576, 1536),
    (256, 576, 1536),
    (512, 1024, 1024),
    (512, 1536, 576),
    (512, 2048, 2048),
    (1024, 576, 1536),
    (1024, 2048, 5632),
)
CPU_HALF_SHAPES = CPU_SHAPES[:2]  # most CPUs compute bfloat16 far slower, so a sample is enough
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MOST_CPU_RANKS = 8
ROUNDS = 5
PAGE_CACHE_NOTE = (
    "disk: the kernel was asked to drop the test file from its page cache and need not obey; a disk read as fast as "
    "memory was one from memory"
)


@dataclass(frozen=True)
class Effort:
    """How long to measure: seconds a product, bytes of copies and of the test file, message sizes, all in all."""

    cpu_shapes: tuple[Shape, ...] = CPU_SHAPES
    gpu_shapes: tuple[Shape, ...] = GPU_SHAPES
    seconds: float = 0.2
    copy_bytes: int = 256 * MIB
    disk_bytes: int = 256 * MIB
    gloo_messages: tuple[int, ...] = tuple(4 * KIB * 4**power for power in range(8))  # 4 KiB to 64 MiB
    nccl_messages: tuple[int, ...] = tuple(4 * KIB * 4**power for power in range(9))  # to 256 MiB
    total_seconds: float = 60.0


FULL = Effort()


def measured_rates(profile: HardwareProfile, folder: Path, effort: Effort = FULL) -> Rates:
    """The cached rates of this machine, else measured now and cached.

    Raises:
        UserError: see measure.
    """
    known = cached_rates(profile)
    if known is not None:
        return known
    rates = measure(profile, folder, effort)
    rates.write(rates_file(profile.identity))
    return rates


def measure(profile: HardwareProfile, folder: Path | None = None, effort: Effort = FULL) -> Rates:
    """Measures within `effort.total_seconds`; the disk is that of `folder` (default: the current one).

    Raises:
        UserError: torch sees fewer GPUs than the profile, or the folder cannot be written.
    """
    start = time.monotonic()
    device, sync = _device(profile)
    threads = torch.get_num_threads()
    torch.set_num_threads(profile.cpu_cores)
    try:
        with heartbeat("measuring matrix products, memory and disk"):
            flops = _matmuls(profile, device, sync, effort)
            host = _copy_rate(torch.device("cpu"), lambda: None, effort)
            memory = _copy_rate(device, sync, effort) if device.type == "cuda" else host
            down, up = _host_link(device, sync, effort) if device.type == "cuda" else (None, None)
            read, write = disk_rates(folder or Path.cwd(), effort.disk_bytes)
    finally:
        torch.set_num_threads(threads)
    with heartbeat("measuring collectives"):
        curves = _links(profile, effort, start + effort.total_seconds)
    for note in curves.notes:
        say(f"note: {note}")
    return Rates(
        identity=profile.identity,
        torch=torch_version(),
        matmul_flops=flops,
        memory_bandwidth=memory,
        host_to_device=down,
        device_to_host=up,
        host_memory_bandwidth=host,
        disk_read=read,
        disk_write=write,
        all_reduce=curves.all_reduce,
        all_gather=curves.all_gather,
        notes=(*curves.notes, PAGE_CACHE_NOTE),
    )


def _device(profile: HardwareProfile) -> tuple[torch.device, Callable[[], None]]:
    """The device to measure, and what waits for it: the CPU, or the slowest of the GPUs."""
    if profile.device == "cpu":
        return torch.device("cpu"), lambda: None
    seen = torch.cuda.device_count()
    if seen < len(profile.gpus):
        raise UserError(
            f"the driver lists {len(profile.gpus)} visible GPUs and torch {torch_version()} sees {seen}; mend "
            "CUDA_VISIBLE_DEVICES or the driver, or set probe_hardware.device=cpu"
        )
    halves = [gpu_type(gpu.name, gpu.compute_capability)[0].half for gpu in profile.gpus]
    index = halves.index(min(halves))
    torch.cuda.set_device(index)
    return torch.device("cuda", index), torch.cuda.synchronize


def seconds_of(run: Callable[[], object], sync: Callable[[], None], budget: float) -> float:
    """Seconds of one call: of the fastest of five rounds, since what else runs here can only slow it.

    The rounds last about `budget` together.
    """
    for _ in range(2):
        run()
    sync()
    start = time.perf_counter()
    run()
    sync()
    once = max(time.perf_counter() - start, 1e-7)
    calls = max(1, min(1000, round(budget / ROUNDS / once)))
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        sync()
        rounds.append((time.perf_counter() - start) / calls)
    return min(rounds)


def _matmuls(
    profile: HardwareProfile, device: torch.device, sync: Callable[[], None], effort: Effort
) -> dict[str, float]:
    """FLOP/s by "MxKxN precision"; float32 without TF32, as the trainer computes it."""
    if device.type == "cuda":
        plan = [(shape, precision) for precision in DTYPES for shape in effort.gpu_shapes]
    else:
        plan = [(shape, "float32") for shape in effort.cpu_shapes]
        plan += [(shape, "bfloat16") for shape in CPU_HALF_SHAPES if shape in effort.cpu_shapes]
    found = {}
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        for (rows, inner, columns), precision in plan:
            left = torch.randn(rows, inner, device=device).to(DTYPES[precision])
            right = torch.randn(inner, columns, device=device).to(DTYPES[precision])
            spent = seconds_of(lambda a=left, b=right: a @ b, sync, effort.seconds)
            found[f"{rows}x{inner}x{columns} {precision}"] = 2.0 * rows * inner * columns / spent
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    return found


def _copy_rate(device: torch.device, sync: Callable[[], None], effort: Effort) -> float:
    """Bytes read and written a second when memory is copied within the device."""
    source = torch.ones(effort.copy_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * effort.copy_bytes / seconds_of(lambda: target.copy_(source), sync, 2 * effort.seconds)


def _host_link(device: torch.device, sync: Callable[[], None], effort: Effort) -> tuple[float, float]:
    """Bytes/s to the device and back, from and to pinned memory."""
    host = torch.ones(effort.copy_bytes // 4, pin_memory=True)
    there = torch.empty_like(host, device=device)
    down = seconds_of(lambda: there.copy_(host, non_blocking=True), sync, 2 * effort.seconds)
    up = seconds_of(lambda: host.copy_(there, non_blocking=True), sync, 2 * effort.seconds)
    return effort.copy_bytes / down, effort.copy_bytes / up


def disk_rates(folder: Path, size: int) -> tuple[float, float]:
    """Bytes/s of reading and of writing with fsync, in `folder`; at most `size` bytes, less on a slow disk.

    Raises:
        UserError: the folder cannot be written or is full.
    """
    block = os.urandom(min(size, 4 * MIB))
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            first = _write(file.fileno(), block, 1)
            blocks = max(1, min(size, round(2 * len(block) / first)) // len(block))
            written = blocks * len(block) / _write(file.fileno(), block, blocks)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            start = time.perf_counter()
            got = 0
            while part := file.read(len(block)):
                got += len(part)
            return got / (time.perf_counter() - start), written
    except OSError as error:
        raise UserError(
            f"{folder} cannot take a test file of {size // MIB} MiB ({error.strerror}); free room or mend its rights"
        ) from None


def _write(handle: int, block: bytes, blocks: int) -> float:
    """Seconds to append so many blocks and have them on the disk."""
    start = time.perf_counter()
    for _ in range(blocks):
        written = 0
        while written < len(block):
            written += os.write(handle, block[written:])
    os.fsync(handle)
    return time.perf_counter() - start


def _links(profile: HardwareProfile, effort: Effort, deadline: float) -> Curves:
    if profile.device == "cuda":
        return measure_links("nccl", len(profile.gpus), effort.nccl_messages, deadline)
    return measure_links("gloo", min(profile.cpu_cores, MOST_CPU_RANKS), effort.gloo_messages, deadline)
