"""What certify calls the same, what it calls different, and what it does not call anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tasks.certificate import (
    Certificate,
    Facts,
    PlanProof,
    certificate_file,
    find_certificate,
    markdown,
)
from tasks.commands.certify import judged_by, merged, verdict
from tasks.commands.certify_compare import TOLERANCES, compare, reference_proof
from tasks.commands.certify_runs import Run, Subject
from tasks.commands.certify_text import lines
from tasks.paths import Paths
from tasks.trainer.run_state import StepRecord
from tests import tiny

BEFORE = {"w": torch.zeros(3), "idle": torch.ones(2)}
AFTER = {"w": torch.tensor([1.0, 2.0, 2.0]), "idle": torch.ones(2)}
FACTS = Facts(clip_bit=True, short_batch=True, padding=True, accumulation=True, unequal_targets=False)
FLOAT32 = TOLERANCES["float32"]


def record(
    loss: float = 2.0, rate: float = 0.1, norm: float = 1.0, samples: tuple[int, ...] = (0, 1)
) -> StepRecord:
    return StepRecord(
        step=1,
        loss=loss,
        grad_norm=norm,
        learning_rate=rate,
        tokens=4,
        target_tokens=4,
        seconds=1.0,
        samples=samples,
    )


def ran(weights: Mapping[str, torch.Tensor] = AFTER, **changes: object) -> Run:
    return Run(tiny.cpu_plan(2), [record(**changes)], weights)  # type: ignore[arg-type]


REFERENCE = ran()


def proof(run: Run, precision: str = "float32") -> PlanProof:
    return compare("ddp2", REFERENCE, run, BEFORE, TOLERANCES.get(precision), FACTS)  # type: ignore[call-overload]


def moved(**tensors: list[float]) -> dict[str, torch.Tensor]:
    return AFTER | {name: torch.tensor(values) for name, values in tensors.items()}


def test_small_differences_are_the_same_and_measured_by_the_distance_moved() -> None:
    near = proof(ran(moved(w=[1.0, 2.0, 2.0003]), loss=2.0 + 1e-6))
    assert near.status == "same" and near.reason is None
    assert near.weights == pytest.approx(1e-4, rel=0.01) and near.worst_tensor == "w"
    assert near.loss == pytest.approx(5e-7, rel=0.01)
    assert near.unmoved == ("idle",) and near.sample_ids_equal


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (ran(moved(w=[1.0, 2.0, 2.3])), "weights differs by 1.0e-01 in w, and 0.001 is allowed"),
        (ran(loss=2.1), "loss differs by 5.0e-02"),
        (ran(norm=1.1), "grad_norm differs by 1.0e-01"),
        (ran(rate=0.1000001), "it took other learning rates"),
        (ran(samples=(0, 2)), "it trained on other samples from step 1 on"),
        (ran(moved(idle=[1.0, 1.0001])), "in idle"),
        (ran(moved(w=[1.0, float("nan"), 2.0])), "in w"),
        (ran(moved(w=[1.0, 2.0])), "in w"),
        (ran(loss=float("nan")), "loss differs"),
        (ran({"w": AFTER["w"]}), "it trained other tensors, such as idle"),
        (ran(moved(more=[1.0])), "it trained other tensors, such as more"),
        (Run(tiny.cpu_plan(2), [record(), record()], AFTER), "it took 2 steps instead of 1"),
        (Run(tiny.cpu_plan(2), [], AFTER), "it took 0 steps instead of 1"),
    ],
)
def test_whatever_parts_from_the_reference_differs(run: Run, reason: str) -> None:
    found = proof(run)
    assert found.status == "differs"
    assert reason in (found.reason or "")
    assert json.loads(found.to_json())["status"] == "differs", "as JSON, which knows no infinity"
    assert "Infinity" not in found.to_json() and "NaN" not in found.to_json()


def test_float64_allows_a_billionth() -> None:
    near = ran(moved(w=[1.0, 2.0, 2.0003]))
    assert proof(near).status == "same"
    assert proof(near, "float64").status == "differs"
    assert proof(ran(loss=2.0 + 1e-8), "float64").status == "differs"
    assert proof(ran(loss=2.0 + 1e-10), "float64").status == "same"


@pytest.mark.parametrize(("family", "weights"), [("llama", 1e-9), ("bloom", 1e-5), ("gpt2", 1e-9)])
def test_a_family_that_rounds_inside_is_allowed_more_in_float64(
    family: str, weights: float, tmp_path: Path
) -> None:
    subject = Subject(family, "", tiny.params(), Paths(tmp_path))
    subject.paths.base.mkdir(parents=True)
    (subject.paths.base / "config.json").write_text(json.dumps({"model_type": family}))
    allowed, rounding = judged_by(subject, "float64")
    assert allowed is not None and allowed.weights == weights and rounding is None
    assert judged_by(subject, "float32")[0] == FLOAT32


def test_other_precisions_are_shown_and_their_samples_judged() -> None:
    far = proof(ran(moved(w=[1.0, 2.0, 2.3]), loss=2.1), "bfloat16")
    assert far.status == "not_judged" and far.weights == pytest.approx(0.1, rel=0.01)
    assert proof(ran(samples=(0, 2)), "bfloat16").status == "differs"


def test_a_run_that_moved_nothing_shows_nothing() -> None:
    still = Run(tiny.cpu_plan(1), [record()], BEFORE)
    assert compare("ddp2", still, still, BEFORE, FLOAT32, FACTS).status == "differs"


# --- the verdict --------------------------------------------------------------------------------


def said(plan: str, status: str, started: bool = True) -> PlanProof:
    return PlanProof(plan=plan, status=status, started=started)  # type: ignore[arg-type]


SINGLE, SAME, OFF = said("single", "reference"), said("ddp2", "same"), said("tp2", "not_run", started=False)


@pytest.mark.parametrize(
    ("proofs", "asked", "same"),
    [
        ([SINGLE, SAME], {"ddp2"}, True),
        ([SINGLE, SAME, said("pp2", "differs")], set(), False),
        ([SINGLE, SAME, OFF], set(), True),
        ([SINGLE, SAME, OFF], {"ddp2", "tp2"}, False),
        ([SINGLE, SAME, said("tp2", "not_run")], set(), False),
        ([SINGLE, OFF], set(), False),
        ([SINGLE], set(), False),
        ([said("single", "not_run"), said("fsdp2", "reference"), SAME], set(), True),
        ([said("single", "not_run"), said("fsdp2", "reference"), SAME], {"single"}, False),
        ([SINGLE, said("ddp2", "not_judged")], set(), None),
        ([SINGLE, said("ddp2", "not_judged"), OFF], {"tp2"}, False),
    ],
)
def test_only_what_was_compared_counts(proofs: list[PlanProof], asked: set[str], same: bool | None) -> None:
    assert verdict(proofs, asked) is same


def part(model: str, status: str, **fields: object) -> PlanProof:
    return PlanProof.model_validate(
        {"plan": "tp2", "model": model, "status": status, "started": True, **fields}
    )


def test_of_several_models_the_worst_counts() -> None:
    good = part(
        "llama", "same", loss=1e-7, grad_norm=2e-6, weights=1e-4, worst_tensor="a", sample_ids_equal=True
    )
    bad = part(
        "qwen2", "differs", loss=1e-3, grad_norm=1e-6, weights=1e-2, worst_tensor="b", sample_ids_equal=True
    )
    bad = bad.model_copy(update={"reason": "off", "learning_rate": 0.0, "facts": FACTS})
    good = good.model_copy(update={"learning_rate": 0.0, "facts": FACTS})
    both = merged([good, bad])
    assert (both.status, both.reason, both.worst_tensor) == ("differs", "qwen2: off", "b")
    assert (both.loss, both.grad_norm, both.weights) == (1e-3, 2e-6, 1e-2)
    assert both.parts == (good, bad) and both.sample_ids_equal and both.facts == FACTS
    refused = part("qwen2", "not_run", started=False, reason="no")
    half = merged([good, refused])
    assert half.status == "not_run" and not half.started and half.loss is None and half.weights is None
    assert merged([good]) == good


# --- what is said and kept ----------------------------------------------------------------------


def certificate(**changes: object) -> Certificate:
    fields: dict[str, object] = {
        "same": True,
        "reference": "single",
        "tolerance": FLOAT32,
        "rounding": None,
        "precision": "float32",
        "steps": 5,
        "trained": "something",
        "device": "the CPU",
        "torch": "2",
        "run_key": "a" * 16,
        "facts": FACTS,
        "plans": (reference_proof("single", REFERENCE, BEFORE, FACTS), proof(ran()), OFF),
    }
    return Certificate.model_validate(fields | changes)


def test_the_table_names_differences_reasons_and_what_was_not_met() -> None:
    refused = OFF.model_copy(update={"reason": "no second GPU"})
    text = "\n".join(lines(certificate(plans=(*certificate().plans[:2], refused))))
    assert "tp2     " in text and "not run: no second GPU" in text
    assert "not met   unequal numbers of learnt tokens on the ranks" in text
    assert "Moved by no step, so a plan must leave them as they were: idle" in text
    nothing = certificate(reference=None, plans=(refused,), facts=None, same=False)
    assert "No plan could be run" in "\n".join(lines(nothing))


def test_a_certificate_is_found_by_its_recipe_alone(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    assert find_certificate(paths, "a" * 16) is None
    certificate().write(certificate_file(paths))
    assert find_certificate(paths, "a" * 16) == certificate()
    assert find_certificate(paths, "b" * 16) is None
    certificate_file(paths).write_text("{}")
    assert find_certificate(paths, "a" * 16) is None, "said, and no stage fails"


def test_the_review_page_says_what_was_shown() -> None:
    assert "not certified" in markdown(None)
    line = markdown(certificate())
    assert "certified, the same as single: ddp2; not run: tp2 (float32, 5 steps on the CPU)" in line
    differs = certificate(plans=(SINGLE, said("pp2", "differs")), same=False)
    assert "NOT certified, DIFFERENT: pp2" in markdown(differs)
