"""Published weight files, read one tensor at a time, and the sharded safetensors that are written from them."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tasks.contracts import write_text
from tasks.errors import UserError
from tasks.trainer.legacy.table import read_object

# Any other type is uint8 here: no type of a weight either.
KINDS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SHARD_BYTES = 2 << 30  # of a written file: about what conversion holds in memory


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors, else its pytorch_model*.bin; what an index names must be there.

    Raises:
        UserError: there are none, or one that the index names is missing.
    """
    for pattern, index in (
        ("*.safetensors", "model.safetensors.index.json"),
        ("pytorch_model*.bin", "pytorch_model.bin.index.json"),
    ):
        found = sorted(folder.glob(pattern))
        if not found:
            continue
        if not (folder / index).is_file():
            return found
        placed = read_object(folder / index).get("weight_map")
        if not isinstance(placed, dict):
            raise UserError(f"{folder / index} has no weight_map; mend the model's files")
        named = {folder / str(name) for name in placed.values()}
        missing = sorted(file.name for file in named if not file.is_file())
        if missing:
            raise UserError(
                f"{folder.name} lacks {', '.join(missing[:3])}, which {index} names; fetch the whole model"
            )
        return sorted(named)
    raise UserError(
        f"{folder} has neither *.safetensors nor pytorch_model*.bin; copy the model's weights there"
    )


def shapes(file: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shapes and types of a file's tensors, without their numbers.

    Raises:
        UserError: the file is broken or holds more than tensors.
    """
    return {name: (tensor.shape, tensor.dtype) for name, tensor in _tensors(file, "meta")}


def tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """A file's tensors, mapped from the disk and not held (an uncompressed .bin of before torch 1.6 is read whole).

    Raises:
        UserError: the file is broken or holds more than tensors.
    """
    return _tensors(file, "cpu")


def _tensors(file: Path, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    if file.suffix == ".safetensors":
        yield from _safetensors(file, device)
        return
    try:
        held = torch.load(
            file, map_location=device, weights_only=True, mmap=device == "cpu" and zipfile.is_zipfile(file)
        )
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{file} cannot be read as tensors alone ({reason}), and nothing else in it is run; fetch it anew"
        ) from None
    if not isinstance(held, dict):
        raise UserError(f"{file} holds a {type(held).__name__} and no tensors by name; fetch it anew")
    for name in list(held):
        tensor = held.pop(name)
        if not isinstance(tensor, torch.Tensor):
            raise UserError(f"{file} holds {name}, which is no tensor; take the published weights")
        yield str(name), tensor


def _safetensors(file: Path, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with safe_open(file, framework="pt") as held:
            for name in held.keys():  # noqa: SIM118 (it is no dictionary)
                if device == "meta":
                    part = held.get_slice(name)
                    kind = KINDS.get(part.get_dtype(), torch.uint8)
                    yield name, torch.empty(part.get_shape(), dtype=kind, device="meta")
                else:
                    yield name, held.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read ({error}); fetch it anew") from None


@dataclass
class Writer:
    """Writes tensors as `model-0000i-of-0000n.safetensors` with an index, holding one file's worth at most."""

    folder: Path
    limit: int = SHARD_BYTES

    def __post_init__(self) -> None:
        self.held: dict[str, torch.Tensor] = {}
        self.size = self.total = 0
        self.files: list[list[str]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self.held and self.size + size > self.limit:
            self._flush()
        self.held[name] = tensor.clone(memory_format=torch.contiguous_format)
        self.size += size
        self.total += size

    def _flush(self) -> None:
        file = self.folder / f"part-{len(self.files)}.safetensors"
        save_file(self.held, file, metadata={"format": "pt"})
        file.chmod(0o644)
        self.files.append(sorted(self.held))
        self.held, self.size = {}, 0

    def finish(self) -> None:
        """Gives the files their names, which say how many there are."""
        if self.held:
            self._flush()
        count, placed = len(self.files), {}
        for number, names in enumerate(self.files):
            new = "model.safetensors" if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"
            (self.folder / f"part-{number}.safetensors").rename(self.folder / new)
            placed.update(dict.fromkeys(names, new))
        if count > 1:
            index = {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(placed.items()))}
            write_text(self.folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")
