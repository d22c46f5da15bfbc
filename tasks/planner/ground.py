"""What rules look at beside a plan, and the words and numbers they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import gcd

from tasks.contracts import HardwareProfile, ModelSpec, Plan
from tasks.planner.workload import Workload


@dataclass(frozen=True)
class Ground:
    """What the rules look at beside the plan. `ranks` processes can be started, `a_node` of them on one node."""

    spec: ModelSpec
    work: Workload
    hardware: HardwareProfile
    batch: int
    ranks: int
    a_node: int
    tp_pinned: bool = False


Rule = Callable[[Plan, Ground], str | None]


def divisors(number: int) -> list[int]:
    """Ascending."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def either(values: Iterable[int]) -> str:
    """1, 2 or 4"""
    words = [str(value) for value in values]
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]


def tensor_widths(spec: ModelSpec) -> dict[str, int]:
    """What tensor parallelism cuts evenly, and how wide it is; of a vocabulary the last rank may hold fewer."""
    widths = {
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "intermediate_size": spec.ffn,
    }
    if spec.moe is not None:
        widths["the experts' intermediate size"] = spec.moe.ffn
        if spec.moe.shared_ffn:
            widths["the shared experts' intermediate size"] = spec.moe.shared_ffn
    return widths


def tensor_degrees(spec: ModelSpec, most: int) -> list[int]:
    return [degree for degree in divisors(gcd(*tensor_widths(spec).values())) if degree <= most]
