"""The files of one run below runs/<RunKey>/: what was resolved, every step's numbers, how it ended."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from pydantic import ConfigDict

from tasks.contracts import Contract, Resolved, write_text

CURVE_COLUMNS = ("step", "loss", "grad_norm", "learning_rate")


class StepRecord(Contract):
    """One optimizer step as logged. `seconds` is its wall time on rank 0, waiting for data included.

    A float16 step that overflowed has an infinite gradient norm, which JSON has no number for.
    """

    model_config = ConfigDict(ser_json_inf_nan="strings")

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    target_tokens: int
    seconds: float
    samples: tuple[int, ...]


class StepLog:
    """runs/<RunKey>/steps.jsonl: appended by rank 0, cut back to the checkpoint on resume."""

    def __init__(self, run: Path) -> None:
        self.path = run / "steps.jsonl"

    def read(self) -> list[StepRecord]:
        """All whole lines (a kill can leave half a line at the end)."""
        if not self.path.is_file():
            return []
        records = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                values = json.loads(line)
            except json.JSONDecodeError:
                break
            records.append(StepRecord.model_validate(values))
        return records

    def cut(self, steps: int) -> None:
        """Keeps the first `steps` steps."""
        kept = [record.model_dump_json() + "\n" for record in self.read()[:steps]]
        write_text(self.path, "".join(kept))

    def append(self, record: StepRecord) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(record.model_dump_json() + "\n")


def write_curves(records: list[StepRecord], path: Path) -> None:
    """CSV for DVC's plots."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(CURVE_COLUMNS)
        for record in records:
            writer.writerow([getattr(record, name) for name in CURVE_COLUMNS])


def freeze(run: Path, resolved: Resolved) -> Resolved:
    """What `auto` means in this run: decided at its first start, the same ever after."""
    path = run / "resolved.json"
    if path.is_file():
        return Resolved.read(path)
    resolved.write(path)
    return resolved


def count_start(run: Path) -> int:
    """How often this run was started, this time included."""
    path = run / "starts"
    starts = int(path.read_text()) + 1 if path.is_file() else 1
    write_text(path, str(starts))
    return starts
