"""How far one plan's run is from another's, by the measures of docs/design.md."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence

import torch

from tasks.certificate import Facts, PlanProof, Tolerance
from tasks.commands.certify_runs import Run
from tasks.contracts import Precision
from tasks.data.order import deal
from tasks.params import Params
from tasks.trainer.loop import Lengths
from tasks.trainer.run_state import StepRecord

TOLERANCES: dict[Precision, Tolerance] = {
    "float32": Tolerance(loss=1e-5, grad_norm=1e-5, weights=1e-3),
    "float64": Tolerance(loss=1e-9, grad_norm=1e-9, weights=1e-9),
}
# In float64, of a family that rounds to float32 inside. A wrong factor is still far beyond it.
ROUNDED_INSIDE = Tolerance(loss=1e-8, grad_norm=1e-8, weights=1e-5)
# Stands for a difference that has no number (NaN, or a tensor that should not have moved): JSON knows no infinity.
BEYOND = sys.float_info.max


def reference_proof(name: str, run: Run, before: Mapping[str, torch.Tensor], facts: Facts) -> PlanProof:
    unmoved = [key for key in run.weights if not _norm(run.weights[key], before[key])]
    zeros = dict.fromkeys(("loss", "grad_norm", "learning_rate", "weights"), 0.0)
    return _of(name, run, "reference", facts).model_copy(
        update={**zeros, "unmoved": tuple(unmoved), "sample_ids_equal": True}
    )


def compare(
    name: str,
    reference: Run,
    run: Run,
    before: Mapping[str, torch.Tensor],
    tolerance: Tolerance | None,
    facts: Facts,
) -> PlanProof:
    """A plan's proof. Samples and rates must be equal in every precision, the rest within `tolerance`, if any."""
    pairs = list(zip(reference.records, run.records, strict=False))
    problems = _order_problems(reference.records, run.records)
    found = {
        key: max((_relative(getattr(a, key), getattr(b, key)) for a, b in pairs), default=BEYOND)
        for key in ("loss", "grad_norm", "learning_rate")
    }
    found["weights"], worst, unmoved = _weights(reference.weights, run.weights, before)
    if found["learning_rate"]:
        problems.append("it took other learning rates")
    if reference.weights.keys() != run.weights.keys():
        other = sorted(reference.weights.keys() ^ run.weights.keys())
        problems.append(f"it trained other tensors, such as {other[0]}")
    for key, most in (
        (tolerance or Tolerance(loss=BEYOND, grad_norm=BEYOND, weights=BEYOND)).model_dump().items()
    ):
        if found[key] > most:
            where = f" in {worst}" if key == "weights" else ""
            problems.append(f"{key} differs by {found[key]:.1e}{where}, and {most:g} is allowed")
    if len(unmoved) == len(reference.weights):
        problems.append("no weight was moved, so nothing is shown")
    status = "differs" if problems else "same" if tolerance else "not_judged"
    return _of(name, run, status, facts).model_copy(
        update={
            **found,
            "reason": "; ".join(problems) or None,
            "worst_tensor": worst,
            "unmoved": unmoved,
            "sample_ids_equal": [a.samples for a in reference.records] == [b.samples for b in run.records],
        }
    )


def _of(name: str, run: Run, status: str, facts: Facts) -> PlanProof:
    plan = run.plan
    return PlanProof.model_validate(
        {
            "plan": name,
            "status": status,
            "steps": len(run.records),
            "ranks": plan.processes,
            "micro_batch": plan.micro_batch,
            "accumulation": plan.accumulation,
            "facts": facts,
            "started": True,
        }
    )


def _order_problems(reference: Sequence[StepRecord], records: Sequence[StepRecord]) -> list[str]:
    problems = []
    if len(reference) != len(records):
        problems.append(f"it took {len(records)} steps instead of {len(reference)}")
    other = [a.step for a, b in zip(reference, records, strict=False) if a.samples != b.samples]
    if other:
        problems.append(f"it trained on other samples from step {other[0]} on")
    return problems


def _weights(
    reference: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    before: Mapping[str, torch.Tensor],
) -> tuple[float, str | None, tuple[str, ...]]:
    """The largest difference over the distance moved, the tensor it is in, and the tensors that never moved."""
    worst, tensor, unmoved = 0.0, None, []
    for key in reference:
        if key not in weights:
            continue
        value = reference[key]
        moved, apart = _norm(value, before[key]), _norm(weights[key], value)
        if moved == 0.0:
            unmoved.append(key)
        ratio = _finite(apart / moved if moved else BEYOND if apart else 0.0)
        if ratio > worst:
            worst, tensor = ratio, key
    return worst, tensor, tuple(unmoved)


def _norm(one: torch.Tensor, other: torch.Tensor) -> float:
    """Of the difference. Tensors of other shapes are apart beyond measure."""
    return float((one.double() - other.double()).norm()) if one.shape == other.shape else BEYOND


def _relative(a: float, b: float) -> float:
    return 0.0 if a == b else _finite(abs(a - b) / max(abs(a), 1e-30))


def _finite(value: float) -> float:
    """NaN compares as neither more nor less, and must not pass for little."""
    return value if math.isfinite(value) else BEYOND


def facts_of(run: Run, params: Params, lengths: Lengths) -> Facts:
    """What the run's steps met, by dealing its samples out once more."""
    plan, records = run.plan, run.records
    padding = accumulation = unequal = False
    for record in records:
        shares = [
            deal(record.samples, lengths.tokens, plan.rows, plan.shares, rank) for rank in range(plan.shares)
        ]
        micros = [micro for share in shares for micro in share]
        padding |= any(len({int(lengths.tokens[row]) for row in micro.rows}) > 1 for micro in micros)
        accumulation |= len(shares[0]) > 1
        targets = {
            sum(int(lengths.targets[row]) for micro in share if micro.counted for row in micro.rows)
            for share in shares
        }
        unequal |= len(targets) > 1
    return Facts(
        clip_bit=any(record.grad_norm > params.train.max_grad_norm for record in records),
        short_batch=any(len(record.samples) < params.global_batch for record in records),
        padding=padding,
        accumulation=accumulation,
        unequal_targets=unequal,
    )
