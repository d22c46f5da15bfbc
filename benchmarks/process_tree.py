"""Memory and processor time of a process with all below it, sampled from outside."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

MIB = 2**20


@contextmanager
def host_peak(every: float = 0.5) -> Iterator[list[int]]:
    """[bytes]: how much more of the host's memory was taken at the peak than before; of a machine that is ours alone."""
    before, peak, done = psutil.virtual_memory().available, [0], threading.Event()

    def watch() -> None:
        while not done.wait(every):
            peak[0] = max(peak[0], before - psutil.virtual_memory().available)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


@dataclass(frozen=True)
class Sample:
    """`resident` counts shared pages once (PSS); `anonymous` are those that belong to no file."""

    seconds: float
    resident: int
    anonymous: int
    processes: int


@dataclass
class Watch:
    """Samples the tree of `pid` every `every` seconds until stopped."""

    pid: int
    every: float = 0.5
    samples: list[Sample] = field(default_factory=list)
    _cpu: dict[tuple[int, float], float] = field(default_factory=dict)
    _done: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._start = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cpu_seconds(self) -> float:
        """Processor time of the tree so far; of a process that ended, until it was last seen."""
        self._sample()
        with self._lock:
            return sum(self._cpu.values())

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(self.every):
            self._sample()

    def _sample(self) -> None:
        resident = anonymous = count = 0
        with self._lock:
            for process in self._tree():
                try:
                    times = process.cpu_times()
                    rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii")
                    self._cpu[process.pid, process.create_time()] = times.user + times.system
                except (psutil.Error, OSError):
                    continue
                kib = {line.split(":")[0]: int(line.split()[1]) for line in rollup.splitlines()[1:]}
                resident += kib["Pss"] * 1024
                anonymous += kib.get("Pss_Anon", kib["Anonymous"]) * 1024
                count += 1
            self.samples.append(Sample(time.monotonic() - self._start, resident, anonymous, count))

    def _tree(self) -> list[psutil.Process]:
        try:
            top = psutil.Process(self.pid)
            return [top, *top.children(recursive=True)]
        except psutil.Error:
            return []
