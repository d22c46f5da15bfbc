"""Where a rank's time goes: computing, or waiting for gradients to be reduced."""

# No `from __future__ import annotations`: DDP reads the comm hook's annotations as objects.
import time

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel


class Mark:
    """A moment on a device: a CUDA event, or the host's clock."""

    def __init__(self, cuda: bool) -> None:
        self.event = torch.cuda.Event(enable_timing=True) if cuda else None
        self.seconds = time.perf_counter()
        if self.event is not None:
            self.event.record()

    def since(self, earlier: "Mark") -> float:
        """Seconds from `earlier` to this mark (both must have passed on the device)."""
        if self.event is not None and earlier.event is not None:
            return earlier.event.elapsed_time(self.event) / 1e3
        return self.seconds - earlier.seconds


class StepClock:
    """Sums compute and, under DDP, exposed communication over steps.

    Exposed communication is the time from the last gradient bucket's computation to the end of the
    backward pass, in which the rank only waits for reductions (and for slower ranks). FSDP2 gathers and scatters
    between the layers of both passes, which is not told apart: it counts as compute.
    """

    def __init__(self, module: torch.nn.Module, cuda: bool) -> None:
        self.cuda = cuda
        self.totals = {"compute": 0.0, "communication": 0.0}
        self._start: Mark | None = None
        self._last_bucket: Mark | None = None
        self._reduced: Mark | None = None
        if isinstance(module, DistributedDataParallel):
            module.register_comm_hook(None, self._hook)

    def _hook(
        self, state: object, bucket: torch.distributed.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        self._last_bucket = Mark(self.cuda)
        return allreduce_hook(None, bucket)

    def start(self) -> None:
        self._start = Mark(self.cuda)
        self._last_bucket = self._reduced = None

    def reduced(self) -> None:
        """Call when the last backward pass of the step has returned."""
        self._reduced = Mark(self.cuda)

    def stop(self) -> None:
        """Call after the step, when its result has been read (the device has caught up)."""
        assert self._start is not None
        waited = 0.0
        if self._last_bucket is not None and self._reduced is not None:
            waited = max(0.0, self._reduced.since(self._last_bucket))
        busy = Mark(self.cuda)
        if busy.event is not None:
            busy.event.synchronize()
        self.totals["communication"] += waited
        self.totals["compute"] += max(0.0, busy.since(self._start) - waited)
