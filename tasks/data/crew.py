"""Work done by several processes, its results in the order of the jobs."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TypeVar

from tasks.errors import UserError
from tasks.probe.host import cpu_cores, usable_cores

Job = TypeVar("Job")
Result = TypeVar("Result")
AHEAD = 3  # jobs a worker that may wait or be done before their turn
COLLECTED_AT = 200_000  # objects more than before; some 100 bytes each
# What transformers imports for a tokenizer, and pyarrow for an array; without these names each worker imports it.
PRELOADED = ["tasks.data.shard_work", "transformers.core_model_loading", "pandas"]


def cores() -> int:
    return cpu_cores(Path("/"), usable_cores())


def get_ready() -> None:
    """Starts the process that workers are forked from, so that it imports what they need beside other work here."""
    _context()
    forkserver.ensure_running()


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


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
    settle()


def settle() -> None:
    """Makes this process one that only prepares rows, beside others that do the same."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process a core; threads besides would only compete
    import pyarrow as pa

    pa.set_cpu_count(1)
    # The collector would walk over all modules, and over each chunk's rows many times, to find next to nothing.
    gc.freeze()
    gc.set_threshold(COLLECTED_AT)


class Crew:
    """`size` worker processes, or none: then the work is done here, which for little work is quicker."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Crew:
        if self._size:
            self._pool = ProcessPoolExecutor(self._size, _context(), _start)
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
            raise UserError(
                "a process that prepares rows was killed, most often since memory ran out; free some and start "
                "again: what is finished is not done again"
            ) from None
