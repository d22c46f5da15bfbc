"""The certificate: what `elastane certify` found, and how a registered version carries it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tasks.contracts import Contract, Precision, Registration
from tasks.errors import UserError
from tasks.params import Params
from tasks.paths import Paths
from tasks.stage import say

if TYPE_CHECKING:
    from mlflow import MlflowClient

TAG = "elastane.certificate"
LINE = "- Plans: "


class Tolerance(Contract):
    """Largest relative differences that still are "the same" (docs/design.md)."""

    loss: float
    grad_norm: float
    weights: float


class Facts(Contract):
    """What the steps met, so that the reach of a proof is known.

    `padding`: a micro-batch held rows of other lengths. `unequal_targets`: data-parallel ranks learnt from different
    numbers of tokens in a step, where a mean over ranks is not the mean over tokens.
    """

    clip_bit: bool
    short_batch: bool
    padding: bool
    accumulation: bool
    unequal_targets: bool


class PlanProof(Contract):
    """How far a plan's run is from the reference's: largest relative differences over all steps.

    `weights` is the largest, over tensors, of the difference over the distance moved; `unmoved` tensors have an exact
    gradient of zero and are left out of it. All are None under a plan that was not run. `started`: workers were, so a
    `not_run` plan failed rather than was ruled out. `parts` are the models, where several were trained.
    """

    plan: str
    status: Literal["reference", "same", "differs", "not_judged", "not_run"]
    reason: str | None = None
    model: str | None = None
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    weights: float | None = None
    worst_tensor: str | None = None
    unmoved: tuple[str, ...] = ()
    sample_ids_equal: bool | None = None
    steps: int = 0
    ranks: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    facts: Facts | None = None
    started: bool = False
    parts: tuple[PlanProof, ...] = ()


class Certificate(Contract):
    """reports/certificate.json. `same` and `tolerance` are None where numbers are shown, not judged: see `rounding`.

    `run_key` is that of the recipe (None for the built-in one): a certificate of another recipe says nothing.
    """

    same: bool | None
    reference: str | None
    tolerance: Tolerance | None
    rounding: str | None
    precision: Precision
    steps: int
    trained: str
    device: str
    torch: str
    run_key: str | None
    facts: Facts | None
    plans: tuple[PlanProof, ...]

    @property
    def words(self) -> str:
        """One line, such as: the same as single: ddp2, fsdp2; not run: tp2 (float32, 5 steps on cpu)."""
        said = {"same": f"the same as {self.reference}", "differs": "DIFFERENT", "not_run": "not run"}
        parts = []
        for status, text in said.items():
            names = [proof.plan for proof in self.plans if proof.status == status]
            if names:
                parts.append(f"{text}: {', '.join(names)}")
        what = "; ".join(parts) or "no plan was compared"
        return f"{what} ({self.precision}, {self.steps} steps on {self.device})"


def certificate_file(paths: Paths) -> Path:
    """No stage's out or dependency: it may come, change and go without making anything stale."""
    return paths.reports / "certificate.json"


def find_certificate(paths: Paths, run_key: str) -> Certificate | None:
    """The certificate of this recipe on this data, or None; one that cannot be read is said and left alone."""
    file = certificate_file(paths)
    if not file.is_file():
        return None
    try:
        found = Certificate.read(file)
    except UserError:
        say(
            f"register: {file} is not a certificate of this version of elastane; run `elastane certify` again"
        )
        return None
    return found if found.run_key == run_key else None


def markdown(certificate: Certificate | None) -> str:
    """The line of a version's page."""
    if certificate is None:
        return f"{LINE}not certified (`elastane certify` shows whether plans train the same model)."
    verdict = "certified" if certificate.same else "NOT certified"
    return f"{LINE}{verdict}, {certificate.words}; `certificate.json` in the run."


def tag_version(client: MlflowClient, name: str, version: str, certificate: Certificate | None) -> None:
    client.set_model_version_tag(name, version, TAG, certificate.words if certificate else "none")


def hand_to_registered(params: Params, paths: Paths, certificate: Certificate) -> None:
    """Gives the certificate to the version that was registered from this recipe before; a lost store is only said."""
    if not paths.registration.is_file():
        return
    registered = Registration.read(paths.registration)
    if registered.run_key != certificate.run_key or registered.version is None:
        return
    from tasks.tracking_store import open_store

    try:
        open_store(params.register_, paths)
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        client, name, version = MlflowClient(), registered.model_name, str(registered.version)
        try:
            text = client.get_model_version(name, version).description or ""
            client.log_artifact(registered.mlflow_run_id, str(certificate_file(paths)))
        except MlflowException as error:
            raise UserError(f"{name} version {version} cannot be found ({error})") from None
        tag_version(client, name, version, certificate)
        line = f"^{re.escape(LINE)}.*$"
        client.update_model_version(
            name, version, re.sub(line, lambda _: markdown(certificate), text, flags=re.M)
        )
    except UserError as error:
        say(f"certify: the registered version does not carry this certificate yet: {error}")
        return
    say(f"certify: {name} version {version} carries this certificate")
