"""What slows a run down most, in words, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tasks.contracts import Plan, RankPerformance

# Below this share of a step the device is never behind the host, which then is the brake: work that is bound by the
# device piles up in its queue, of some 1,000 kernels.
NEVER_BEHIND = 0.03
ROOM = 0.5  # below this share of its memory a device may have room for a larger micro-batch


@dataclass(frozen=True)
class Bottleneck:
    """`share` of a rank's wall time is lost to it; `advice` is one sentence."""

    name: str
    share: float
    advice: str


def bottleneck(
    ranks: Sequence[RankPerformance], plan: Plan, memory_limit_bytes: int, mfu: float | None = None
) -> Bottleneck:
    """The largest loss of time that is worth a word, or computing itself."""
    lost = max(_losses(ranks, plan), key=lambda loss: loss.share, default=None)
    return lost or _computing(ranks, plan, memory_limit_bytes, mfu)


def _losses(ranks: Sequence[RankPerformance], plan: Plan) -> Iterator[Bottleneck]:
    waits = max(rank.data_wait for rank in ranks)
    if waits > 0.1:
        yield Bottleneck(
            "waiting for data",
            waits,
            f"The ranks wait for data {waits:.0%} of the time; put the prepared data on a faster disk or give the "
            "process more CPU cores.",
        )
    saves = max(rank.checkpoint for rank in ranks)
    if saves > 0.1:
        yield Bottleneck(
            "saving checkpoints",
            saves,
            f"Saving checkpoints takes {saves:.0%} of the time; raise train.checkpoint_every_seconds (more is lost "
            "when a run dies) or put runs/ on a faster disk.",
        )
    yield from _exchange(ranks, plan)
    bubble = sum(rank.pipeline_wait for rank in ranks) / len(ranks)
    if bubble > 0.1:
        yield Bottleneck(
            "pipeline bubble",
            bubble,
            f"The pipeline's stages wait for each other {bubble:.0%} of the time, with {plan.accumulation} "
            f"micro-batches over {plan.pp} stages; smaller micro-batches (per_device_train_batch_size) or fewer "
            "stages fill it.",
        )
    idle = max(rank.idle for rank in ranks)
    if idle > 0.2:
        yield Bottleneck(
            "host",
            idle,
            f"{idle:.0%} of the time the device does nothing between steps: logging, the operating system or another "
            "program on this machine; look at the load of its CPU.",
        )


def _exchange(ranks: Sequence[RankPerformance], plan: Plan) -> Iterator[Bottleneck]:
    """Ranks that finish early wait for the slowest within their exchange; what even the slowest waits is the exchange.

    Stages of a pipeline have unequal exchanges, so there the difference says nothing.
    """
    most = max(rank.communication for rank in ranks)
    least = min(rank.communication for rank in ranks)
    if plan.pp == 1 and most - least > 0.1:
        slow = min(ranks, key=lambda rank: rank.communication).rank
        yield Bottleneck(
            "slow rank",
            most - least,
            f"One rank waits {most:.0%} of the time for a slower one, rank {slow}; look for another program or a "
            "hotter card on its device.",
        )
    elif most > 0.15:
        way = (
            "a larger train.global_batch exchanges less often (and changes what is learned), a faster link changes "
            "nothing else"
        )
        if plan.tp > 1:
            way = (
                "tensor parallelism sends in every layer, so a smaller tensor_parallel_degree sends less, with "
                "sharding=fsdp2 or pipeline stages in its place"
            )
        elif plan.sharding == "fsdp2":
            way = (
                "a larger per_device_train_batch_size gathers the weights less often, and sharding=none not at all, "
                "where memory allows"
            )
        yield Bottleneck(
            "exposed communication",
            most,
            f"Exchange between ranks that hides behind no computing takes {most:.0%} of the time; {way}.",
        )


def _computing(
    ranks: Sequence[RankPerformance], plan: Plan, memory_limit_bytes: int, mfu: float | None
) -> Bottleneck:
    used = max(rank.peak_memory_bytes for rank in ranks) / memory_limit_bytes
    busy = min(1 - rank.idle - rank.data_wait for rank in ranks)
    if plan.replication == "data_parallel":
        return Bottleneck(
            "one process for all GPUs",
            busy,
            "One process copies the model to every GPU for each micro-batch and launches the kernels of all; "
            "select_strategy.replication=ddp learns the same with a process a GPU.",
        )
    behind = [rank.queued for rank in ranks if rank.queued is not None]
    if behind and max(behind) < NEVER_BEHIND:
        way = "a larger per_device_train_batch_size" if plan.accumulation > 1 else "a larger global batch"
        more = "" if plan.compiled else " or select_strategy.compile=true"
        return Bottleneck(
            "launching kernels",
            busy,
            "The GPU waits for the host, which launches small kernels one by one and is never ahead; "
            f"{way}{more} does more with each.",
        )
    if plan.device == "cpu":
        return Bottleneck(
            "computing", busy, "Computing takes nearly all of the time; a GPU is the only large gain left."
        )
    reached = "" if mfu is None else f" (MFU {mfu:.0%})"
    if used < ROOM and plan.accumulation > 1:
        return Bottleneck(
            "small micro-batches",
            busy,
            f"Only {used:.0%} of the device memory is used{reached}; a larger per_device_train_batch_size may be "
            "faster and changes nothing in the result.",
        )
    return Bottleneck(
        "computing",
        busy,
        f"Computing takes nearly all of the time{reached}; more or faster GPUs are the only large gain left.",
    )
