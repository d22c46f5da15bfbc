"""Work done by several processes, its results in the order of the jobs."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TypeVar

from tasks.errors import UserError
from tasks.probe.host import cpu_cores, usable_cores

Job = TypeVar("Job")
Result = TypeVar("Result")
AHEAD = 3  # jobs a worker that may wait or be done before their turn
PRELOADED = ["tasks.data.shard_work"]


def cores() -> int:
    return cpu_cores(Path("/"), usable_cores())


def _end_with_parent() -> None:
    """Ends this process when the stage has ended: its kernel parent is the fork server, which lives as long as we."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _start() -> None:
    _end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process a core; threads besides would only compete
    import pyarrow as pa

    pa.set_cpu_count(1)


class WorkerLost(UserError):
    """A worker process ended before its work did."""


class Crew:
    """`size` worker processes, or none: then the work is done here, which for little work is quicker."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Crew:
        if self._size:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(PRELOADED)
            self._pool = ProcessPoolExecutor(self._size, context, _start)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    @property
    def alone(self) -> bool:
        return not self._size

    def ordered(self, work: Callable[[Job], Result], jobs: Iterable[Job]) -> Iterator[Result]:
        """The results in the order of `jobs`, of which few are begun before their turn."""
        if self._pool is None:
            yield from map(work, jobs)
            return
        waiting: deque[Future[Result]] = deque()
        try:
            for job in jobs:
                waiting.append(self._pool.submit(work, job))
                if len(waiting) >= AHEAD * self._size:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise WorkerLost(
                "a process that prepares rows was killed, most often since memory ran out; free some and start "
                "again: what is finished is not done again"
            ) from None
