"""What certify says: a table, and what the steps met."""

from __future__ import annotations

from collections.abc import Iterable

from tasks.certificate import Certificate, Facts, PlanProof

MET = {
    "clip_bit": "gradients that were clipped",
    "short_batch": "a short last batch",
    "padding": "padded rows",
    "accumulation": "several micro-batches a step",
    "unequal_targets": "unequal numbers of learnt tokens on the ranks",
}
WORDS = {
    "reference": "reference",
    "same": "yes",
    "differs": "NO",
    "not_judged": "not judged",
    "not_run": "not run",
}


def lines(certificate: Certificate) -> list[str]:
    said = [
        f"trained   {certificate.trained}",
        f"          {certificate.steps} steps in {certificate.precision} on {certificate.device}, each plan from the "
        "base's checkpoint",
    ]
    if certificate.facts:
        said += list(_met(certificate.facts))
    width = max(len(proof.plan) for proof in certificate.plans)
    said += ["", f"{'plan':{width}}  {'loss':>8} {'norm':>8} {'weights':>8}  same"]
    for proof in certificate.plans:
        said.append(_row(proof, width))
        said += [f"{'':{width}}    {part.model}: {part.reason}" for part in proof.parts if part.reason]
    return [*said, "", *_below(certificate)]


def _met(facts: Facts) -> Iterable[str]:
    values = facts.model_dump()
    met = [text for key, text in MET.items() if values[key]]
    not_met = [text for key, text in MET.items() if not values[key]]
    yield f"met       {', '.join(met) or 'nothing where plans could part ways'}"
    if not_met:
        yield f"not met   {', '.join(not_met)}: of these the proof says nothing"


def _row(proof: PlanProof, width: int) -> str:
    found = (proof.loss, proof.grad_norm, proof.weights)
    numbers = " ".join(f"{'–' if value is None else f'{value:.1e}':>8}" for value in found)
    reason = f": {proof.reason}" if proof.reason and not proof.parts else ""
    return f"{proof.plan:{width}}  {numbers}  {WORDS[proof.status]}{reason}"


def _below(certificate: Certificate) -> Iterable[str]:
    if certificate.reference is None:
        yield "No plan could be run, so nothing is shown."
    elif certificate.tolerance is None:
        yield (
            f"Largest relative differences from {certificate.reference}. {certificate.rounding} rounds too coarsely "
            "for a bound that a wrong plan would break, so they are shown, not judged."
        )
    else:
        allowed = certificate.tolerance
        yield (
            f"Largest relative differences from {certificate.reference}; allowed: {allowed.loss:g} for loss and "
            f"gradient norm, {allowed.weights:g} of the distance moved for weights."
        )
    if certificate.precision == "float32" and any(proof.status == "differs" for proof in certificate.plans):
        yield "Whether that is rounding or a wrong sum, --float64 shows: a right plan is far closer there."
    unmoved = sorted({name for proof in certificate.plans for name in proof.unmoved})
    if unmoved:
        yield f"Moved by no step, so a plan must leave them as they were: {', '.join(unmoved)}"
