"""Seconds of collectives over the ranks of one mesh axis."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.planner.machine import GLOO_LATENCY, Machine


@dataclass(frozen=True)
class Group:
    """`size` ranks that talk, `stride` ranks apart in the world (tensor parallel innermost, pipeline outermost)."""

    size: int
    stride: int

    def in_a_node(self, gpus_per_node: int) -> int:
        """How many of the group share a node."""
        return max(1, min(self.size, gpus_per_node // self.stride if self.stride < gpus_per_node else 1))


def ring_seconds(machine: Machine, group: Group, size: float, trips: int) -> float:
    """`trips` x (n-1)/n x `size` bytes around a ring, and a latency a hop.

    2 trips are an all-reduce, 1 an all-gather or reduce-scatter: 2(n-1) latencies + 2(n-1)/n bytes over the
    bandwidth (Thakur et al., 2005). Groups that share a node's ports share their bandwidth.
    """
    if group.size == 1 or not size:
        return 0.0
    constants = machine.constants
    share = trips * (group.size - 1) / group.size * size
    if machine.device == "cpu":
        return trips * (group.size - 1) * GLOO_LATENCY + share / machine.link
    inside = group.in_a_node(machine.gpus_per_node)
    nodes = -(-group.size // inside)
    speed = machine.link * constants.link
    hops = trips * (inside - 1) * constants.latency
    if nodes > 1:
        # NCCL's trees between nodes make the latency grow with the logarithm of their number.
        speed = min(speed, machine.fabric * constants.network * inside / machine.gpus_per_node)
        hops += trips * (nodes - 1).bit_length() * constants.network_latency
    return hops + share / speed * (1 + constants.half_size / size)


def point_to_point(machine: Machine, size: float, between_nodes: bool) -> float:
    """Seconds for `size` bytes from one rank to the next."""
    constants = machine.constants
    if machine.device == "cpu":
        return GLOO_LATENCY + size / machine.link
    if between_nodes:
        return constants.network_latency + size / (machine.fabric * constants.network) * machine.gpus_per_node
    return constants.latency + size / (machine.link * constants.link)
