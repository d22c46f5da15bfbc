"""The boundary between the loop, which decides what is learned, and what executes a Plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch.nn import functional


@dataclass(frozen=True)
class Batch:
    """One padded micro-batch on the CPU: `input_ids` and `labels` of shape (rows, longest row).

    `labels` are -100 where nothing is learnt; they are not shifted. `positions`, of the same shape, restart at 0 where
    a document begins, and where padding does; None where a row is one document.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor | None = None

    def padded(self, rows: int, tokens: int, multiple: int) -> Batch:
        """At least `rows` rows of at least `tokens` tokens, a multiple of `multiple`; what is added teaches nothing."""
        have_rows, have_tokens = self.input_ids.shape
        right = max(tokens, have_tokens)
        right += -right % multiple - have_tokens
        below = max(rows - have_rows, 0)
        if not right and not below:
            return self
        positions = self.positions
        if positions is not None:
            beside = torch.arange(right).expand(have_rows, right)
            whole = torch.arange(have_tokens + right).expand(below, have_tokens + right)
            positions = torch.cat([torch.cat([positions, beside], 1), whole])
        return Batch(
            functional.pad(self.input_ids, (0, right, 0, below), value=0),
            functional.pad(self.labels, (0, right, 0, below), value=-100),
            positions,
        )

    def unlearnt(self) -> Batch:
        """The same tokens, nothing of which is learnt."""
        return Batch(self.input_ids, torch.full_like(self.labels, -100), self.positions)


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, the same on every rank. `loss` is the mean over the global batch's targets."""

    loss: float
    grad_norm: float
    learning_rate: float
    skipped: bool
    flags: tuple[bool, ...]


class Engine(Protocol):
    """Executes a Plan."""

    def train_step(self, batches: Sequence[Batch], target_tokens: int, flags: Sequence[bool]) -> StepResult:
        """One optimizer step over this rank's share of the global batch.

        Args:
            batches: this rank's micro-batches; every rank has equally many.
            target_tokens: learnt tokens of the whole global batch, over all ranks.
            flags: what this rank wishes to tell the others (save, stop); the result has their union.
        """
        ...

    def save(self, folder: Path) -> None:
        """Writes this rank's part of the training state into `folder` (collective)."""
        ...

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote, under this or another Plan (collective)."""
        ...

    def export(self, folder: Path, checkpoint: Path) -> None:
        """Writes the trained weights of a checkpoint in Hugging Face's or PEFT's layout (rank 0 does).

        Args:
            checkpoint: what `save` wrote, by any plan of this run.
        """
        ...

    def parameter_counts(self) -> tuple[int, int]:
        """(trainable, all) parameters of the model, tied ones once."""
        ...

    def clock(self) -> dict[str, float]:
        """Seconds spent in steps since the start, by kind: see `StepClock`."""
        ...

    def close(self) -> None: ...
