"""`elastane reproduce models:/name/3`: replays a registered version from its own commit and compares."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.commands.replay_inputs import write_params
from tasks.contracts import (
    BaseModelRef,
    Contract,
    DataManifest,
    EvalReport,
    FinalManifest,
    PlanReport,
    Resolved,
    TrainReport,
)
from tasks.errors import USER_ERROR_EXIT_CODE, UserError
from tasks.git_state import git
from tasks.params import Params
from tasks.paths import Paths
from tasks.registry import Registered, find_registered
from tasks.stage import die_with_parent, heartbeat, say
from tasks.train import FROM_SCRATCH

STAGES = ("prepare_data", "probe_hardware", "select_strategy", "train", "evaluate")
LOSS_TOLERANCE = 1e-5
# Another copy of the code, and the store that MLflow notes in the environment once it was opened.
NOT_HANDED_ON = {"PYTHONPATH", "MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "MLFLOW_EXPERIMENT_ID"}


class ReproduceReport(Contract):
    """A registered version beside its replay.

    `mismatch` says which input is another one; the replay then ends before training, and what it would have
    found is None. `same`: no mismatch, and the tuned loss within LOSS_TOLERANCE (relative). `bit_identical`:
    the weights as well, which only the same plan on the same kind of hardware promises.
    """

    uri: str
    version: int
    commit: str
    registered: EvalReport
    replayed: EvalReport | None
    registered_data: str
    replayed_data: str
    registered_base: str
    replayed_base: str
    registered_plan: str
    replayed_plan: str | None
    mismatch: str | None
    loss_difference: float | None
    same: bool
    bit_identical: bool

    def table(self) -> str:
        """What was compared, one line each, and the verdict."""
        pairs = {
            "data": (self.registered_data[:16], self.replayed_data[:16]),
            "base model": (self.registered_base[:16], self.replayed_base[:16]),
        }
        old, new = self.registered, self.replayed
        if new is not None and self.replayed_plan is not None:
            pairs |= {
                "run key": (old.run_key, new.run_key),
                "weights": (old.content_hash[:16], new.content_hash[:16]),
                "base loss": (f"{old.base.loss:.6f}", f"{new.base.loss:.6f}"),
                "tuned loss": (f"{old.tuned.loss:.6f}", f"{new.tuned.loss:.6f}"),
                "plan": (self.registered_plan, self.replayed_plan),
            }
        lines = [f"{'':<12}{'registered':<26}{'replayed':<26}"]
        lines += [
            f"{name:<12}{one:<26}{two:<26}{'equal' if one == two else 'differs'}"
            for name, (one, two) in pairs.items()
        ]
        return "\n".join([*lines, self.verdict()])

    def verdict(self) -> str:
        name = f"{self.uri} (commit {self.commit[:12]})"
        if self.mismatch:
            return f"{name} was NOT reproduced: {self.mismatch}; nothing was trained, since it would be another model"
        if not self.same:
            return f"{name} was NOT reproduced: tuned loss differs by {self.loss_difference:.1e} (relative)"
        if self.bit_identical:
            return f"{name} was reproduced: the weights are equal bit for bit"
        return (
            f"{name} was reproduced: tuned loss within {self.loss_difference:.1e} (relative), "
            "weights not equal bit for bit"
        )


def reproduce(params: Params, paths: Paths, uri: str) -> ReproduceReport:
    """Replays prepare_data to evaluate in a temporary git worktree and compares with what was registered.

    Args:
        uri: `models:/name/3` or `models:/name@alias`.

    Raises:
        UserError: no such version, no git, the commit or an artifact is gone, or a stage refuses its input.
        RuntimeError: a stage failed.
    """
    registered = find_registered(params.register_, paths, uri)
    with tempfile.TemporaryDirectory(prefix="elastane-reproduce-") as folder:
        kept = _download(registered, Path(folder) / "registered")
        with _worktree(paths.root, registered, kept / "git.diff", Path(folder) / "worktree") as root:
            replay = Paths(root)
            base = FinalManifest.read(kept / "final.json").base
            write_params(kept / "params.yaml", base, paths, replay)
            _freeze(kept, registered, replay)
            for stage in STAGES:
                _run(stage, root)
                if stage == "prepare_data" and _mismatch(registered, base, kept, replay):
                    break
            return _compare(uri, registered, kept, replay)


def _download(registered: Registered, folder: Path) -> Path:
    from mlflow.artifacts import download_artifacts
    from mlflow.exceptions import MlflowException

    folder.mkdir()
    run = f"runs:/{registered.run_id}"
    sources = {
        name: f"{run}/{name}"
        for name in (
            "params.yaml",
            "git.diff",
            "manifest.json",
            "eval_report.json",
            "train_report.json",
            "plan.json",
        )
    }
    sources["final.json"] = f"models:/{registered.name}/{registered.version}/data/final/manifest.json"
    # What `auto` meant; a run that was trained elsewhere and pulled is registered without it.
    optional = {"resolved.json": f"{run}/resolved.json"}
    with heartbeat(f"fetching {registered.name} version {registered.version} from MLflow"):
        for name, source in (sources | optional).items():
            try:
                # Copied, since a local store hands back its own file.
                shutil.copyfile(download_artifacts(artifact_uri=source), folder / name)
            except (MlflowException, OSError) as error:
                if name in optional:
                    continue
                raise UserError(
                    f"{source} is not to be had ({str(error).splitlines()[0]}), and a replay needs it; "
                    "choose a version that `elastane run` registered and whose artifacts are still there"
                ) from None
    return folder


@contextmanager
def _worktree(root: Path, registered: Registered, diff: Path, place: Path) -> Iterator[Path]:
    """The registered commit, with the registered change on top; yields the workspace in it."""
    name = f"{registered.name} version {registered.version}"
    prefix = git(root, "rev-parse", "--show-prefix")
    if prefix is None:
        raise UserError(f"{root} is no git repository (or git is missing), and a replay starts from a commit")
    if not registered.commit:
        raise UserError(f"{name} was made outside a git repository, so its code is unknown; choose another")
    if git(root, "cat-file", "-e", f"{registered.commit}^{{commit}}") is None:
        raise UserError(
            f"{name} was made from commit {registered.commit}, which this repository lacks; run `git fetch --all`"
        )
    made = subprocess.run(
        ["git", "worktree", "add", "--detach", "--quiet", str(place), registered.commit],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        raise RuntimeError(f"git could not check out {registered.commit}: {made.stderr.strip()}")
    try:
        if diff.stat().st_size and git(place, "apply", "--whitespace=nowarn", str(diff)) is None:
            raise UserError(
                f"the change on top of {registered.commit[:12]} that {name} was made with does not apply; "
                "choose another version"
            )
        yield place / prefix.decode().strip()
    finally:
        git(root, "worktree", "remove", "--force", str(place))
        git(root, "worktree", "prune")


def _freeze(kept: Path, registered: Registered, replay: Paths) -> None:
    """Gives the replay what `auto` meant in the registered run, whatever this machine would choose."""
    if (kept / "resolved.json").is_file():
        resolved = Resolved.read(kept / "resolved.json")
    else:
        budget = PlanReport.read(kept / "plan.json").resolved.token_budget
        precision = TrainReport.read(kept / "train_report.json").precision
        resolved = Resolved(precision=precision, token_budget=budget)
    resolved.write(replay.run(registered.run_key) / "resolved.json")
    # A remote that has the answer must not be asked for it.
    (replay.run(registered.run_key) / FROM_SCRATCH).touch()


def _run(stage: str, root: Path) -> None:
    say(f"── {stage} (replay)")
    environment = {name: value for name, value in os.environ.items() if name not in NOT_HANDED_ON}
    done = subprocess.run(
        [sys.executable, "-m", f"tasks.{stage}"],
        cwd=root,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        preexec_fn=die_with_parent,
        check=False,
    )
    if done.returncode == USER_ERROR_EXIT_CODE:
        message = json.loads(Paths(root).status(stage).read_text(encoding="utf-8"))["message"]
        raise UserError(f"the replay stopped at {stage}: {message}")
    if done.returncode:
        raise RuntimeError(f"{stage} ended with code {done.returncode} in the replay; its output is above")


def _mismatch(registered: Registered, base: BaseModelRef, kept: Path, replay: Paths) -> str | None:
    """Which of the replay's inputs is not what the version was made from, in words; data first."""
    found = []
    before, after = DataManifest.read(kept / "manifest.json"), DataManifest.read(replay.manifest)
    if after.content_hash != registered.data_hash:
        rows = f"the rows of {before.source} are other ones"
        if before.source_fingerprint == after.source_fingerprint:
            rows = f"the same rows of {before.source} became other tokens"
        found.append(f"{rows} (data {registered.data_hash[:12]} then, {after.content_hash[:12]} now)")
    here = BaseModelRef.read(replay.base_ref).content_hash
    if here != base.content_hash:
        found.append(
            f"the base {base.name_or_path} holds other weights ({base.content_hash[:12]} then, {here[:12]} now)"
        )
    return " and ".join(found) or None


def _compare(uri: str, registered: Registered, kept: Path, replay: Paths) -> ReproduceReport:
    # The run's report may be a later one's of the same recipe; what the version says of itself counts.
    before = EvalReport.read(kept / "eval_report.json").model_copy(
        update={"content_hash": registered.content_hash, "data_hash": registered.data_hash}
    )
    base = FinalManifest.read(kept / "final.json").base
    mismatch = _mismatch(registered, base, kept, replay)
    after = None if mismatch else EvalReport.read(replay.eval_report)
    difference = abs(after.tuned.loss - registered.loss) / max(abs(registered.loss), 1e-12) if after else None
    return ReproduceReport(
        uri=uri,
        version=registered.version,
        commit=registered.commit,
        registered=before,
        replayed=after,
        registered_data=registered.data_hash,
        replayed_data=DataManifest.read(replay.manifest).content_hash,
        registered_base=base.content_hash,
        replayed_base=BaseModelRef.read(replay.base_ref).content_hash,
        registered_plan=_plan(kept / "plan.json"),
        replayed_plan=_plan(replay.plan) if after else None,
        mismatch=mismatch,
        loss_difference=difference,
        same=difference is not None and difference <= LOSS_TOLERANCE,
        bit_identical=after is not None and registered.content_hash == after.content_hash,
    )


def _plan(report: Path) -> str:
    plan = PlanReport.read(report).chosen.plan
    return f"{plan.name}, micro-batch {plan.micro_batch}"
