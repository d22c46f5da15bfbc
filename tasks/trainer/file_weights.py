"""A model's safetensors files as a source of boxes: mapped, so that a box costs its own bytes and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from tasks.errors import UserError
from tasks.trainer.weights import put, same_parameters

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def has_files(folder: Path) -> bool:
    """Whether the weights lie where `from_pretrained` would look for them first."""
    return (folder / ONE_FILE).is_file() or (folder / INDEX).is_file()


class FileWeights:
    """The files of `folder`, for the parameters of `model`, which may be on the meta device.

    A tensor is called as in the model, or with the model's `base_model_prefix` put before or taken away, as BLOOM's
    at the hub are; a tied one has any of its names. Everything that may be wrong is looked at here, before it is read.

    Raises:
        UserError: a file is missing or broken, a tensor missing or of another shape.
    """

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        self._files = _Files(folder)
        self._keys: dict[str, str] = {}
        self._kinds: dict[str, torch.dtype] = {}
        self.unlike: list[tuple[str, str]] = []  # tied in the model, and in the files two that differ
        state = model.state_dict(keep_vars=True)
        missing = []
        for names in same_parameters(model):
            found = [key for name in names for key in self._spelt(name, model.base_model_prefix)]
            if not found and isinstance(state[names[0]], torch.nn.Parameter):
                missing.append(names[0])
            if not found:  # a buffer, which the model has made itself
                continue
            self._files.check(found[0], state[names[0]].shape)
            self._keys |= dict.fromkeys(names, found[0])
            self._kinds |= dict.fromkeys(names, state[names[0]].dtype)
            self.unlike += [
                (found[0], other) for other in found[1:] if not self._files.equal(found[0], other)
            ]
        if missing:
            more = f" and {len(missing) - 1} more of its tensors" if len(missing) > 1 else ""
            raise UserError(
                f"{self._files.named} has no {missing[0]}{more}, which config.json asks for; fetch the whole model, or "
                "take weights and config of one model"
            )

    def _spelt(self, name: str, prefix: str) -> list[str]:
        """The one way in which the files spell a name, if any does."""
        ways = (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}."))
        return [key for key in ways if key in self._files][:1]

    def __contains__(self, name: str) -> bool:
        return name in self._keys

    def kind(self, name: str) -> torch.dtype:
        return self._kinds[name]

    def read(self, name: str, offsets: Sequence[int], into: torch.Tensor) -> None:
        put(self._files.box(self._keys[name], offsets, into.shape), self._kinds[name], into)

    def forget(self, name: str) -> None:
        pass


def stored_kind(folder: Path) -> torch.dtype:
    """The type of the first floating-point tensor, which `dtype="auto"` means where config.json says none."""
    kinds = _Files(folder).kinds_of_the_first()
    return next((kind for kind in kinds if kind.is_floating_point), torch.float32)


class _Files:
    """Tensors by key, whichever file they are in. A file is opened when it is first needed, and stays so."""

    def __init__(self, folder: Path) -> None:
        self._open: dict[Path, Any] = {}
        if (folder / ONE_FILE).is_file():
            self.named = folder / ONE_FILE
            self._of = dict.fromkeys(self._opened(self.named, None).keys(), self.named)
            return
        self.named = folder / INDEX
        try:
            placed: dict[str, str] = json.loads(self.named.read_text(encoding="utf-8"))["weight_map"]
            self._of = {key: folder / file for key, file in placed.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self.named} does not say which file has which tensor ({error!r}); fetch it anew"
            ) from None

    def __contains__(self, key: str) -> bool:
        return key in self._of

    def kinds_of_the_first(self) -> Iterator[torch.dtype]:
        """Types of the tensors in the first file."""
        first = min(self._of.values())
        for key in self._opened(first, None).keys():  # noqa: SIM118 (it is no dictionary)
            shape = torch.Size(self._opened(first, None).get_slice(key).get_shape())
            yield self.box(key, (0,) * len(shape), shape).dtype

    def box(self, key: str, offsets: Sequence[int], sizes: torch.Size) -> torch.Tensor:
        """A view of the mapped file."""
        where = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        part: torch.Tensor = self._slice(key)[where]
        return part

    def check(self, key: str, expected: torch.Size) -> None:
        shape = self._slice(key).get_shape()
        if list(expected) != shape:
            raise UserError(
                f"{self._of[key]}: {key} is {shape} where config.json makes it {list(expected)}; take weights and "
                "config of one model"
            )

    def equal(self, one: str, other: str) -> bool:
        shapes = [torch.Size(self._slice(key).get_shape()) for key in (one, other)]
        start = (0,) * len(shapes[0])
        return shapes[0] == shapes[1] and torch.equal(
            *(self.box(key, start, shapes[0]) for key in (one, other))
        )

    def _slice(self, key: str) -> Any:
        file = self._of[key]
        try:
            return self._opened(file, key).get_slice(key)
        except SafetensorError as error:
            raise UserError(
                f"{file} does not have {key} ({error}), which {self.named.name} says; fetch it anew"
            ) from None

    def _opened(self, file: Path, key: str | None) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                wanted = f", which should have {key}," if key else ""
                raise UserError(f"{file}{wanted} cannot be read ({error}); fetch it anew") from None
        return self._open[file]
