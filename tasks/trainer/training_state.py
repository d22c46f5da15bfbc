"""What a checkpoint holds: trainable weights and the optimizer's state of them, as boxes by parameter name."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tasks.contracts import Precision
from tasks.params import TrainParams
from tasks.trainer.loading import DTYPES
from tasks.trainer.pieces import Piece, local

READ_BYTES = 2 * 2**30  # read at once for an export


def boxes(pieces: Sequence[Piece], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """{"model": {name: box}, "optimizer": {"state": {name: {key: box or tensor}}}} of this rank's pieces.

    State that is not of the weight's shape (Adafactor's rows and columns, scales of 8-bit blocks) is written as it is:
    its optimizer only runs where every rank has the whole parameter.
    """
    weights: dict[str, Any] = {}
    states: dict[str, Any] = {}
    for piece in pieces:
        if piece.name in weights:  # the other end of a tied table
            continue
        weights[piece.name] = piece.box(piece.weight)
        states[piece.name] = {
            key: piece.box(value) if _is_like(value, piece.weight) else number(value)
            for key, value in optimizer.state[piece.weight].items()
        }
    return {"model": weights, "optimizer": {"state": states}}


def _is_like(value: object, weight: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == weight.shape and value.dim() > 0


def number(value: Any) -> torch.Tensor:
    """A plain number (bitsandbytes counts its steps in one) as a checkpoint holds it; a tensor is its own."""
    return value if isinstance(value, torch.Tensor) else torch.tensor(float(value))


def take_numbers(
    pieces: Sequence[Piece], optimizer: torch.optim.Optimizer, loaded: Mapping[str, Any]
) -> None:
    """After a load into `boxes`: tensors are read in place, plain numbers go back to the optimizer."""
    for piece in pieces:
        own = optimizer.state[piece.weight]
        for key, value in own.items():
            if not isinstance(value, torch.Tensor):
                own[key] = type(value)(loaded["optimizer"]["state"][piece.name][key])


def twins(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Piece]]:
    """Both ends of a tied table, where one rank holds both."""
    seen: dict[str, Piece] = {}
    for piece in pieces:
        if piece.name in seen:
            yield seen[piece.name], piece
        seen[piece.name] = piece


def copy_twins(pieces: Sequence[Piece], optimizer: torch.optim.Optimizer) -> None:
    """After a load: the second end of a tied table is as the first."""
    for first, second in twins(pieces):
        local(second.weight.detach()).copy_(local(first.weight.detach()))
        own = optimizer.state[second.weight]
        for key, value in optimizer.state[first.weight].items():
            if isinstance(value, torch.Tensor):
                local(own[key]).copy_(local(value))
            else:
                own[key] = value


def read_weights(checkpoint: Path, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """All trained weights of a checkpoint by name, whole and on the CPU, in `dtype` or as they were saved.

    Any one process may do it, whatever the plan that saved them; a group of tensors is read at a time.
    """
    stored = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    prefix = "model."
    weights: dict[str, torch.Tensor] = {}
    group: dict[str, torch.Tensor] = {}
    size = 0

    def take() -> None:
        with warnings.catch_warnings():  # it says that one process reads, which is what is meant
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load({"model": group}, checkpoint_id=checkpoint, no_dist=True)
        weights.update({name: value.to(dtype or value.dtype) for name, value in group.items()})
        group.clear()

    for key, described in stored.items():
        if not key.startswith(prefix) or not isinstance(described, TensorStorageMetadata):
            continue
        group[key.removeprefix(prefix)] = torch.empty(described.size, dtype=described.properties.dtype)
        size += described.size.numel() * described.properties.dtype.itemsize
        if size > READ_BYTES:
            take()
            size = 0
    take()
    return weights


def export(outline: Any, train: TrainParams, precision: Precision, checkpoint: Path, folder: Path) -> None:
    """Writes a checkpoint's weights as Hugging Face or PEFT do: adapters in float32, full weights in `precision`.

    Args:
        outline: the whole model (with its adapters) without its numbers.
    """
    full = train.finetuning_type == "full"
    weights = read_weights(checkpoint, DTYPES[precision] if full else None)
    check_whole(outline, weights)
    tables = {} if full else {"save_embedding_layers": train.lora.train_embeddings}
    outline.save_pretrained(folder, state_dict=weights, **tables)
    (folder / "README.md").unlink(missing_ok=True)


def check_whole(outline: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Every trained parameter of the whole model is there in its whole shape, and nothing else.

    Raises:
        RuntimeError: it is not; half an adapter is worse than none.
    """
    expected = {name: value.shape for name, value in outline.named_parameters() if value.requires_grad}
    found = {name: value.shape for name, value in weights.items()}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        first = wrong[0]
        raise RuntimeError(
            f"the checkpoint does not hold what was trained: {first} should have shape {expected.get(first)} and has "
            f"{found.get(first)} ({len(wrong)} such parameters); nothing was exported"
        )
