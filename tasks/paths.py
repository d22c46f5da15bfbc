"""Every path of a workspace, said once. A workspace is the folder that holds params.yaml."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tasks.errors import UserError


@dataclass(frozen=True)
class Paths:
    """Paths below the workspace `root`."""

    root: Path

    @classmethod
    def here(cls) -> Paths:
        """The workspace of the current folder.

        Raises:
            UserError: no params.yaml here.
        """
        root = Path.cwd()
        if not (root / "params.yaml").is_file():
            raise UserError(
                f"{root} holds no params.yaml, and every command runs where one is; change to the project's folder"
            )
        return cls(root)

    @property
    def params(self) -> Path:
        return self.root / "params.yaml"

    @property
    def base(self) -> Path:
        """The base model: base.json, config, tokenizer, and the weights if they were converted here."""
        return self.root / "data" / "base"

    @property
    def base_ref(self) -> Path:
        return self.base / "base.json"

    @property
    def prepared(self) -> Path:
        """Tokenised splits (`train.arrow`, `validation.arrow`) with manifest.json and rejected.jsonl."""
        return self.root / "data" / "prepared"

    @property
    def preparing(self) -> Path:
        """Parts of the data that prepare_data has finished, until data/prepared is whole."""
        return self.prepared.with_name(f".{self.prepared.name}.parts")

    @property
    def manifest(self) -> Path:
        return self.prepared / "manifest.json"

    @property
    def rejected(self) -> Path:
        return self.prepared / "rejected.jsonl"

    @property
    def reports(self) -> Path:
        return self.root / "reports"

    @property
    def hardware(self) -> Path:
        return self.reports / "hardware.json"

    @property
    def plan(self) -> Path:
        return self.reports / "plan.json"

    @property
    def final(self) -> Path:
        """What was trained: adapter or weights, manifest.json, train_report.json."""
        return self.root / "checkpoints" / "final"

    @property
    def train_report(self) -> Path:
        return self.reports / "train_report.json"

    @property
    def train_performance(self) -> Path:
        return self.reports / "train_performance.json"

    @property
    def curves(self) -> Path:
        """Loss, gradient norm and learning rate by step (CSV, a DVC plot)."""
        return self.reports / "train_curves.csv"

    @property
    def eval_report(self) -> Path:
        return self.reports / "eval_report.json"

    @property
    def samples(self) -> Path:
        return self.reports / "samples.json"

    @property
    def registration(self) -> Path:
        return self.reports / "registration.json"

    @property
    def runs(self) -> Path:
        """Resumable checkpoints, locks, status; never a DVC out, never in git."""
        return self.root / "runs"

    def run(self, run_key: str) -> Path:
        return self.runs / run_key

    def status(self, stage: str) -> Path:
        return self.runs / "status" / f"{stage}.json"

    @property
    def flow_lock(self) -> Path:
        return self.runs / "flow.lock"

    @property
    def mlflow_db(self) -> Path:
        return self.root / "mlflow.db"

    @property
    def mlflow_artifacts(self) -> Path:
        return self.root / "mlartifacts"

    @property
    def prefect_home(self) -> Path:
        return self.runs / "prefect"


def cache_folder() -> Path:
    """Where measured rates and file hashes are kept between runs, outside every workspace."""
    base = os.environ.get("ELASTANE_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "elastane"
    )
    return Path(base)


def rates_file(identity: str) -> Path:
    """Rates measured on the machine of this identity."""
    return cache_folder() / "rates" / f"{identity}.json"


def corrections_file(identity: str) -> Path:
    """What trials taught the planner about the machine of this identity."""
    return cache_folder() / "corrections" / f"{identity}.json"
