"""Where the time of a step goes: forward, backward, communication that nothing hides, waiting in a pipeline, optimizer.

Marks are put on the device's own stream, so the device is never waited for; they are read once it has passed them.
"""

# No `from __future__ import annotations`: DDP reads the comm hook's annotations as objects.
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

KINDS = ("forward", "backward", "communication", "pipeline_wait", "optimizer")
QUEUED = "queued"  # see StepClock

Hook = Callable[[Any, torch.distributed.GradBucket], torch.futures.Future[torch.Tensor]]


class Mark:
    """A moment on a device: a CUDA event on the current stream, or the host's clock."""

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

    def passed(self) -> bool:
        return self.event is None or self.event.query()


class StepClock:
    """Sums seconds by kind over steps: from `start` to `stop`, the time before each mark belongs to the mark's kind.

    Forward passes mark themselves by hooks on `modules`, and so does communication that the device waits for:

    - DDP: compressing a bucket of gradients, and the time from the last bucket to the end of the backward pass, in
      which the rank only waits for the sums (and for slower ranks).
    - FSDP2: the time between the end of what was computed and the first kernel of what follows, in which a group of
      weights arrives and is copied to its place, or gradients are handed to be scattered.
    - tensor parallelism: its collectives, where they are in `exchanging()`. In compiled layers they are part of them.

    In a pipeline (`watch_stages`) what lies between the passes of its micro-batches is `pipeline_wait`. `queued` is
    no kind: the seconds by which the device was behind the host when the last backward pass was issued. Near zero,
    the host launches kernels no faster than the device runs them. A CPU has no queue.

    Args:
        modules: what computes the loss, one a pipeline stage held here.
        hook: (state, hook) of DDP, as tasks/trainer/comm_hooks.py makes them; None for a plain all-reduce.
    """

    def __init__(
        self,
        modules: torch.nn.Module | Sequence[torch.nn.Module],
        cuda: bool,
        hook: tuple[Any, Hook] | None = None,
    ) -> None:
        self.cuda = cuda
        self._sums = dict.fromkeys((*KINDS, QUEUED), 0.0)
        self._step: list[tuple[str, Mark]] = []
        self._issued: Mark | None = None
        self._unread: deque[tuple[list[tuple[str, Mark]], Mark | None]] = deque()
        self._phase = "forward"
        self._reducing = False
        for module in [modules] if isinstance(modules, torch.nn.Module) else modules:
            module.register_forward_pre_hook(self._enter, prepend=True)
            module.register_forward_hook(self._leave)
            if isinstance(module, DistributedDataParallel):
                state, reduce = hook or (module.process_group, allreduce_hook)
                module.register_comm_hook(state, self._timed_hook(reduce))
            else:
                self._watch_shards(module)

    # --- a step ---------------------------------------------------------------------------------

    def start(self) -> None:
        _running[:] = [self]
        self._step = [("", Mark(self.cuda))]
        self._phase, self._reducing, self._issued = "forward", False, None

    def mark(self, kind: str) -> None:
        """The time since the mark before belongs to `kind`. Outside a step nothing happens."""
        if self._step:
            self._step.append((kind, Mark(self.cuda)))

    def reduced(self) -> None:
        """Call when the last backward pass of the step has returned."""
        self.mark("communication" if self._reducing else self._phase)
        self._issued = self._step[-1][1]
        self._phase, self._reducing = "optimizer", False

    def stop(self) -> None:
        """Call after the step, when its result has been read (the device has caught up)."""
        assert self._step, "a step is started before it is stopped"
        self.mark("optimizer")
        self._unread.append((self._step, self._issued))
        self._step = []
        _running.clear()
        self._read()

    @property
    def totals(self) -> dict[str, float]:
        """Seconds by kind, and `queued`, of all steps that the device has passed."""
        self._read()
        return dict(self._sums)

    def _read(self) -> None:
        while self._unread and self._unread[0][0][-1][1].passed():
            marks, issued = self._unread.popleft()
            for (_, earlier), (kind, later) in pairwise(marks):
                self._sums[kind] += later.since(earlier)
            begin = marks[0][1]
            if issued is not None and issued.event is not None:
                self._sums[QUEUED] += max(0.0, issued.since(begin) - (issued.seconds - begin.seconds))

    # --- forward passes -------------------------------------------------------------------------

    def _enter(self, module: torch.nn.Module, inputs: object) -> None:
        self.mark(self._phase)
        self._phase, self._reducing = "forward", False

    def _leave(self, module: torch.nn.Module, inputs: object, output: object) -> None:
        self.mark("forward")
        self._phase = "backward"

    # --- communication --------------------------------------------------------------------------

    def _timed_hook(self, hook: Hook) -> Hook:
        def reduce(state: object, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
            self.mark("backward")
            future = hook(state, bucket)
            self.mark("communication")
            self._reducing = True
            return future

        return reduce

    def _watch_shards(self, module: torch.nn.Module) -> None:
        """The places where FSDP2 makes the computing stream wait, or on a CPU the host (torch's own names).

        A gather is waited for where it is used on a GPU and where it is begun on a CPU.
        """
        for group in _shard_groups(module):
            begins = lambda group=group: group._all_gather_result is None and not group.is_unsharded  # noqa: E731
            group.unshard = self._timed(group.unshard, begins)
            waits = lambda group=group: group._all_gather_result is not None  # noqa: E731
            group.wait_for_unshard = self._timed(group.wait_for_unshard, waits)
            group.post_backward = self._timed(group.post_backward, lambda group=group: group.reduce_grads)
            group.finalize_backward = self._timed(group.finalize_backward, lambda: True)

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """The time within is communication, whichever pass it is part of."""
        self.mark(self._phase)
        yield
        self.mark("communication")

    def _timed(self, call: Callable[..., Any], waits: Callable[[], bool]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            if not waits():
                return call(*arguments, **named)
            with self.exchange():
                return call(*arguments, **named)

        return timed

    # --- pipelines ------------------------------------------------------------------------------

    def watch_stages(self, stages: Iterable[Any]) -> None:
        """Tells a pipeline's passes from waiting for its neighbours.

        Call for each `torch.distributed.pipelining` stage that is built; they receive before a pass and send after it.
        """
        for stage in stages:
            for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
                setattr(stage, name, self._pass(getattr(stage, name), name.split("_", 1)[0]))

    def _pass(self, call: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def passing(*arguments: Any, **named: Any) -> Any:
            self.mark("pipeline_wait")
            self._phase = kind
            result = call(*arguments, **named)
            self.mark(kind)
            self._phase = "pipeline_wait"
            return result

        return passing


_running: list[StepClock] = []  # the clock of the step that runs in this process, if any


def exchanging() -> AbstractContextManager[None]:
    """For a collective in the middle of a pass, far from any clock: see `StepClock.exchange`."""
    if torch.compiler.is_compiling() or not _running:
        return nullcontext()
    return _running[0].exchange()


def _shard_groups(module: torch.nn.Module) -> list[Any]:
    """FSDP2's parameter groups below a module, each once."""
    found: dict[int, Any] = {}
    for part in module.modules():
        if isinstance(part, FSDPModule):
            state = part._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:  # before torch 2.13 a module has one group or none
                groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
            found |= {id(group): group for group in groups}
    return list(found.values())
