"""`elastane certify`: trains the same steps under several plans and shows that they learn the same."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from tasks.certificate import Certificate, Facts, PlanProof, Tolerance, certificate_file, hand_to_registered
from tasks.commands.certify_compare import ROUNDED_INSIDE, TOLERANCES, compare, facts_of, reference_proof
from tasks.commands.certify_names import NotRun, Wanted, parse_name, plan_for
from tasks.commands.certify_runs import Run, Subject, bench, forget, initial_weights, train_under
from tasks.commands.certify_tiny import USUAL_FAMILIES, Family, tiny_subjects
from tasks.contracts import (
    METHOD_NAMES,
    BaseModelRef,
    DataManifest,
    FinetuningType,
    HardwareProfile,
    Plan,
    Precision,
)
from tasks.data.packing import training_rows
from tasks.errors import UserError
from tasks.params import read_params
from tasks.paths import Paths
from tasks.planner.capabilities import TRAINABLE_NOW
from tasks.planner.model_spec import model_spec
from tasks.planner.problem import Problem
from tasks.probe_hardware import ROOT, read_machine
from tasks.run_key import run_key
from tasks.select_strategy import as_problem, read_config
from tasks.stage import say
from tasks.trainer.families import FAMILIES
from tasks.trainer.loop import Lengths

REFERENCE = "single"
USUAL = ("ddp2", "fsdp2", "tp2", "pp2")
ON_FOUR_GPUS = ("tp2pp2", "dp2tp2", "dp2pp2")


@dataclass(frozen=True)
class Request:
    """What was asked for. No names: the usual ones, which may be not run without that being a failure.

    `tiny`, `family` and `method` are about the built-in recipe. Device cpu trains on the CPU although there are GPUs.
    """

    names: tuple[str, ...] = ()
    steps: int = 5
    precision: Precision = "float32"
    tiny: bool = False
    family: Family | None = None
    method: FinetuningType | None = None
    device: Literal["auto", "cpu"] = "auto"


@dataclass(frozen=True)
class Case:
    """One recipe on one machine."""

    subject: Subject
    hardware: HardwareProfile
    problem: Problem
    precision: Precision
    steps: int


def run(request: Request) -> Certificate:
    """Certifies the workspace of the current folder, or the built-in recipe where it has no rows or none was asked for.

    Raises:
        UserError: a name is no plan, or the workspace's files are not what they should be.
    """
    wanted = [parse_name(name) for name in dict.fromkeys(request.names)]
    own = None if request.tiny else _workspace(request.device)
    if own is None and not request.tiny:
        say(
            "certify: no rows are prepared here, so the built-in tiny recipe is trained (`elastane run` prepares yours)"
        )
    if own is not None:
        if request.family or request.method:
            raise UserError(
                "--family and --method choose the built-in recipe, and this is yours; add --tiny, or leave them"
            )
        return _keep(certify([own[0]], wanted, own[1], request), own[0])
    families = (request.family,) if request.family else USUAL_FAMILIES
    with tempfile.TemporaryDirectory(prefix="elastane-certify-") as folder:
        hardware = read_machine(request.device, os.environ, ROOT)
        subjects = tiny_subjects(Path(folder), families, request.method or "full")
        return certify(subjects, wanted, hardware, request)


def _workspace(device: Literal["auto", "cpu"]) -> tuple[Subject, HardwareProfile] | None:
    """The current folder's recipe and machine; None where nothing is prepared."""
    root = Path.cwd()
    paths = Paths(root)
    if not (paths.params.is_file() and paths.manifest.is_file()):
        return None
    params = read_params(paths.params)
    manifest = DataManifest.read(paths.manifest)
    key = run_key(params, manifest, BaseModelRef.read(paths.base_ref))
    method = METHOD_NAMES[params.train.finetuning_type]
    what = (
        f"{method} of {params.model.name_or_path} on {manifest.source} ({manifest.train.rows} rows), "
        f"global batch {params.global_batch}"
    )
    wish = "cpu" if device == "cpu" else params.probe_hardware.device
    return Subject("recipe", what, params, paths, key), read_machine(wish, os.environ, ROOT)


def certify(
    subjects: Sequence[Subject], wanted: Sequence[Wanted], hardware: HardwareProfile, request: Request
) -> Certificate:
    """Trains every subject under every plan; `single` is what others must equal, or the first that could be run."""
    asked = {each.name for each in wanted}
    listed = [Wanted(REFERENCE), *(each for each in wanted or _usual(hardware) if each.name != REFERENCE)]
    results = [prove(_case(subject, hardware, request), listed) for subject in subjects]
    proofs = [merged(parts) for parts in zip(*results, strict=True)]
    reference = next((proof.plan for proof in proofs if proof.status == "reference"), None)
    facts = [proof.facts for proof in proofs if proof.facts]
    tolerance, rounding = judged_by(subjects[0], request.precision)
    gpus = f"{len(hardware.gpus)} x {hardware.gpus[0].name}" if hardware.gpus else "the CPU"
    return Certificate(
        same=verdict(proofs, asked),
        reference=reference,
        tolerance=tolerance,
        rounding=rounding,
        precision=request.precision,
        steps=request.steps,
        trained="; ".join(subject.what for subject in subjects),
        device=gpus,
        torch=torch.__version__,
        run_key=subjects[0].run_key,
        facts=any_of(facts) if facts else None,
        plans=tuple(proofs),
    )


def _usual(hardware: HardwareProfile) -> list[Wanted]:
    names = USUAL + (ON_FOUR_GPUS if len(hardware.gpus) >= 4 else ())
    return [parse_name(name) for name in names]


def _case(subject: Subject, hardware: HardwareProfile, request: Request) -> Case:
    if request.precision == "float64" and subject.params.train.optim == "adamw_8bit":
        raise UserError("train.optim=adamw_8bit computes in float32, and --precision is float64; use float32")
    planned: Precision = "float32" if request.precision == "float64" else request.precision
    spec = model_spec(read_config(subject.paths.base / "config.json"))
    manifest = DataManifest.read(subject.paths.manifest)
    problem = as_problem(subject.params, manifest, hardware, spec, planned, TRAINABLE_NOW)
    return Case(subject, hardware, problem, request.precision, request.steps)


def prove(case: Case, wanted: Sequence[Wanted]) -> list[PlanProof]:
    """A proof a plan, in their order."""
    subject, precision = case.subject, case.precision
    lengths = Lengths(training_rows(subject.paths.prepared))
    before = initial_weights(subject.params, subject.paths, precision)
    tolerance, _ = judged_by(subject, precision)
    say(f"certify: {case.steps} steps of {subject.what}")
    reference: Run | None = None
    proofs = []
    with bench(subject, case.steps) as here:
        for each in wanted:
            ran = _train(case, each, here)
            if isinstance(ran, NotRun):
                say(f"certify: {each.name} was not run: {ran.reason}")
                proof = PlanProof(plan=each.name, status="not_run", reason=ran.reason, started=ran.started)
            elif reference is None:
                reference = ran
                proof = reference_proof(each.name, ran, before, facts_of(ran, subject.params, lengths))
            else:
                facts = facts_of(ran, subject.params, lengths)
                proof = compare(each.name, reference, ran, before, tolerance, facts)
                forget(here, each.name)
            proofs.append(proof.model_copy(update={"model": subject.model}))
    return proofs


def _train(case: Case, wanted: Wanted, here: Paths) -> Run | NotRun:
    plan = plan_for(wanted, case.problem, case.precision)
    if not isinstance(plan, Plan):
        return plan
    return train_under(here, wanted.name, plan, case.precision, case.hardware)


def judged_by(subject: Subject, precision: Precision) -> tuple[Tolerance | None, str | None]:
    """What is allowed, or None and what rounds too coarsely to be judged."""
    hook = subject.params.train.communication_hook
    if hook != "none":
        return None, f"train.communication_hook={hook}"
    family = FAMILIES.get(str(read_config(subject.paths.base / "config.json").get("model_type")))
    if precision == "float64" and family is not None and family.rounds:
        return ROUNDED_INSIDE, None
    allowed = TOLERANCES.get(precision)
    return allowed, None if allowed else precision


def merged(parts: Sequence[PlanProof]) -> PlanProof:
    """The worst of a plan over several models; one that one model could not be trained under was not run."""
    if len(parts) == 1:
        return parts[0]
    worst = next(
        status
        for status in ("differs", "not_run", "not_judged", "same", "reference")
        if any(part.status == status for part in parts)
    )
    together: dict[str, object] = {
        "model": None,
        "reason": "; ".join(f"{part.model}: {part.reason}" for part in parts if part.reason) or None,
        "parts": tuple(parts),
    }
    if worst == "not_run":
        refused = [part for part in parts if part.status == worst]
        return max(refused, key=lambda part: part.started).model_copy(update=together)
    ran = [part for part in parts if part.status != "not_run"]
    numbers = ("loss", "grad_norm", "learning_rate", "weights")
    together |= {key: max(getattr(part, key) for part in ran) for key in numbers}
    return max(ran, key=lambda part: part.weights or 0.0).model_copy(
        update={
            **together,
            "status": worst,
            "unmoved": tuple(f"{part.model}: {name}" for part in ran for name in part.unmoved),
            "sample_ids_equal": all(part.sample_ids_equal for part in ran),
            "facts": any_of([part.facts for part in ran if part.facts]),
        }
    )


def any_of(facts: Sequence[Facts]) -> Facts:
    return Facts(**{key: any(getattr(each, key) for each in facts) for key in Facts.model_fields})


def verdict(proofs: Sequence[PlanProof], asked: set[str]) -> bool | None:
    """True if plans were compared and all agree; None if they were not to be judged.

    A plan that was asked for by name and not run, or that failed in its workers, is no agreement; one device alone may
    be too small for the model, which says nothing about the others.
    """
    statuses = {proof.status for proof in proofs}
    broken = any(
        proof.plan in asked or (proof.started and proof.plan != REFERENCE)
        for proof in proofs
        if proof.status == "not_run"
    )
    if "differs" in statuses or broken or not statuses & {"same", "not_judged"}:
        return False
    return None if "not_judged" in statuses else True


def _keep(certificate: Certificate, subject: Subject) -> Certificate:
    """Writes what was judged, for the version that is registered from this recipe, now or later."""
    if certificate.tolerance is not None:
        certificate.write(certificate_file(subject.paths))
        hand_to_registered(subject.params, subject.paths, certificate)
    return certificate
