"""All-reduce and all-gather by message size and number of ranks, each rank a process of its own.

The first thing the ranks do is one small all-reduce that must end in time: on cards without peer access it may
never end, and then this says so instead of waiting.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

import torch
import torch.distributed as dist

from tasks.stage import die_with_parent

Backend = Literal["nccl", "gloo"]
SELF_TEST_SECONDS = 20.0
POINT_SECONDS = 0.1
MOST_CALLS = 20


@dataclass
class Curves:
    """Number of ranks -> (message bytes, seconds) points, and what went wrong."""

    all_reduce: dict[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    all_gather: dict[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def add(self, name: str, ranks: int, size: int, seconds: float) -> None:
        curve = self.all_reduce if name == "all_reduce" else self.all_gather
        curve[ranks] = (*curve.get(ranks, ()), (size, seconds))


@dataclass(frozen=True)
class Problem:
    """Why curves are missing: the self-test did not end in `detail` s, a rank said `detail`, or the time was up."""

    kind: Literal["hang", "failed", "late"]
    detail: str = ""

    def sentence(self, backend: Backend, ranks: int) -> str:
        what = f"{backend} over {ranks} {'GPUs' if backend == 'nccl' else 'processes'}"
        if self.kind == "late":
            return f"collectives with {what}: the time was up, so curves are short or missing; measure when all is idle"
        if self.kind == "failed":
            return f"collectives with {what} failed ({self.detail}), and training would too; mend that first"
        fix = (
            "set NCCL_P2P_DISABLE=1"
            if backend == "nccl"
            else "look for a firewall or a wrong GLOO_SOCKET_IFNAME"
        )
        why = ", as on cards without peer access" if backend == "nccl" else ""
        return f"an all-reduce of 4 bytes with {what} did not end within {self.detail} s{why}; {fix} and measure again"


def group_sizes(ranks: int) -> tuple[int, ...]:
    """2, 4, 8, … and all ranks."""
    sizes = [2**power for power in range(1, 12) if 2**power < ranks]
    return (*sizes, ranks) if ranks > 1 else ()


def measure_links(
    backend: Backend,
    ranks: int,
    messages: Sequence[int],
    deadline: float,
    self_test_seconds: float = SELF_TEST_SECONDS,
    main: Callable[..., None] | None = None,
) -> Curves:
    """Starts `ranks` processes on this machine and collects their points until `deadline` (time.monotonic()).

    Args:
        main: what a rank runs instead of the measuring, with the same arguments (tests let it hang or fail).
    """
    curves = Curves()
    if ranks < 2:
        return curves
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])
    # The store lives here and takes a free port by itself: nothing can take the port in between.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        context.Process(
            target=main or _rank,
            args=(rank, ranks, backend, store.port, tuple(messages), pipes[rank][1]),
            daemon=True,
        )
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            process.start()
        for _, child in pipes:
            child.close()
        problem = _collect([parent for parent, _ in pipes], curves, deadline, self_test_seconds)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    if problem:
        curves.notes = (problem.sentence(backend, ranks),)
    return curves


def _collect(
    pipes: Sequence[Connection], curves: Curves, deadline: float, self_test: float
) -> Problem | None:
    """Reads what the ranks say into `curves`; the reason why not everything came, if so."""
    open_pipes = list(pipes)
    limit, late = deadline, Problem("late")
    while open_pipes:
        ready = wait(open_pipes, timeout=max(0.0, limit - time.monotonic()))
        if not ready:
            return late
        for pipe in ready:
            try:
                kind, *rest = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                return Problem("failed", "a rank ended without a word")
            if kind == "failed":
                return Problem("failed", str(rest[0]))
            if kind == "testing":
                limit, late = min(deadline, time.monotonic() + self_test), Problem("hang", f"{self_test:g}")
            elif kind == "passed":
                limit, late = deadline, Problem("late")
            elif kind == "point":
                curves.add(*rest)
            elif kind == "done":
                open_pipes.remove(pipe)  # type: ignore[arg-type]
    return None


# --- in a rank ----------------------------------------------------------------------------------


def _rank(
    rank: int, ranks: int, backend: Backend, port: int, messages: tuple[int, ...], pipe: Connection
) -> None:
    """A rank's life: meet, test, measure; rank 0 tells the points, every rank its failure."""
    die_with_parent()
    try:
        _meet(rank, ranks, backend, port)
        if rank == 0:
            pipe.send(("testing",))
        device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
        one = torch.ones(1, device=device)
        dist.all_reduce(one)
        if one.item() != ranks:
            raise RuntimeError(f"an all-reduce of ones over {ranks} ranks gave {one.item():g}")
        if rank == 0:
            pipe.send(("passed",))
        for size in group_sizes(ranks):
            group = dist.new_group(list(range(size)))
            if rank < size:
                _points(rank, size, group, device, messages, pipe)
            _barrier(dist.group.WORLD, device)
        pipe.send(("done",))
    except Exception as error:  # noqa: BLE001 - whatever fails in a rank is said to the parent, which decides
        pipe.send(("failed", f"rank {rank}: {type(error).__name__}: {_gist(str(error))}"))
    finally:
        pipe.close()
    os._exit(0)  # destroying NCCL's communicators may wait for a rank that is gone


def _gist(text: str) -> str:
    """The first line of an error, and what NCCL says below its words "Last error:"."""
    first, *rest = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    last = [after for line, after in pairwise(rest) if line == "Last error:"]
    return "; ".join([first, *last])


def _meet(rank: int, ranks: int, backend: Backend, port: int) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    elif sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))


def _points(
    rank: int, ranks: int, group: Any, device: torch.device, messages: tuple[int, ...], pipe: Connection
) -> None:
    # torch 2.13 renamed it and warns about the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    for name in ("all_reduce", "all_gather"):
        for size in messages:
            count = max(1, size // 4 // ranks) * ranks
            whole = torch.zeros(count, device=device)
            part = torch.zeros(count // ranks, device=device)
            if name == "all_reduce":
                call = partial(dist.all_reduce, whole, group=group)
            else:
                call = partial(gather, whole, part, group=group)
            seconds = _timed(call, group, device)
            if rank == 0:
                pipe.send(("point", name, ranks, count * 4, seconds))


def _timed(call: Callable[[], object], group: Any, device: torch.device) -> float:
    """Seconds of a call on the slowest rank; all ranks make equally many calls."""
    _round(call, 1, group, device)
    once = _round(call, 1, group, device)
    calls = max(1, min(MOST_CALLS, int(POINT_SECONDS / once)))
    return _round(call, calls, group, device)


def _round(call: Callable[[], object], calls: int, group: Any, device: torch.device) -> float:
    _barrier(group, device)
    sync = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    sync()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    sync()
    spent = torch.tensor((time.perf_counter() - start) / calls, dtype=torch.float64, device=device)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX, group=group)
    return max(float(spent), 1e-9)


def _barrier(group: Any, device: torch.device) -> None:
    """NCCL guesses the device, and warns, unless it is told."""
    dist.barrier(group=group, device_ids=[device.index] if device.type == "cuda" else None)
