"""The way back: an exported model of this project's own class, in the layout that it was published in.

Nobody else has the class, and programs that run the published model (vLLM, llama.cpp) read the published layout.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

from tasks.contracts import write_text
from tasks.errors import UserError
from tasks.trainer.legacy.checkpoint import SHARD_BYTES, Writer
from tasks.trainer.legacy.convert import convert
from tasks.trainer.legacy.registry import LEGACY
from tasks.trainer.legacy.table import KEPT, Native, Rule, Settings, read_object

# Of the published tokenizer_config.json; the rest of it names the publisher's class.
FLAGS = ("add_bos_token", "add_eos_token")


def published_here(base: Path) -> bool:
    """Whether exports of the model in the folder `base` are written back."""
    return (base / KEPT).is_dir()


def check_foldable(model: PreTrainedModel) -> None:
    """Raises UserError: an adapter that no weights of the published layout stand for."""
    if getattr(model.config, "unit_head", False) and isinstance(model.get_output_embeddings(), LoraLayer):
        raise UserError(
            "this head is used with rows of length one, and what its adapter (lm_head in train.lora.targets) adds "
            "changes their lengths, so it cannot be merged; leave out --merge, or train without that target"
        )


def write_back(base: Path, folder: Path, name: str, shard_bytes: int = SHARD_BYTES) -> str:
    """Rewrites the native model in `folder`, in place, as it was published; a sentence on what is in it now.

    Host memory: one written file's worth (`shard_bytes`). On the disk both layouts lie for a while.

    Args:
        base: the folder of the base model, which keeps the published small files.
        name: what the user calls the model.
    """
    kept = base / KEPT
    settings = Settings.read(kept, name)
    native = LEGACY[str(settings.values["model_type"])].native(settings)
    fresh = Path(tempfile.mkdtemp(prefix=".published-", dir=folder))
    kind = _write_weights(native, folder, Writer(fresh, shard_bytes))
    for old in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        old.unlink()
    for new in fresh.iterdir():
        new.rename(folder / new.name)
    fresh.rmdir()
    values = {key: value for key, value in settings.values.items() if key != "dtype"}
    _write(folder / "config.json", values | {"torch_dtype": str(kind).removeprefix("torch.")})
    _complete(folder, kept, "generation_config.json")
    _complete(folder, kept, "tokenizer_config.json", FLAGS)
    for file in kept.iterdir():
        if not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)
    return _said(settings, folder)


def open_again(folder: Path, name: str, dtype: torch.dtype) -> Any:
    """The model of a folder in the published layout, converted as one that was published."""
    family = LEGACY[str(read_object(folder / "config.json")["model_type"])]
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as made:
        native = Path(made) / "native"
        native.mkdir()
        convert(family, folder, name, native)
        return AutoModelForCausalLM.from_pretrained(native, dtype=dtype)


def _write_weights(native: Native, folder: Path, writer: Writer) -> torch.dtype:
    with ExitStack() as opened:
        files = [opened.enter_context(safe_open(file, "pt")) for file in sorted(folder.glob("*.safetensors"))]
        held = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (it is no dictionary)
        for rule, layer in _tensors(native):
            targets = [target.replace("{n}", layer) for target in rule.targets]
            whole = torch.cat([held.pop(target).get_tensor(target) for target in targets])
            writer.add(rule.source.replace("{n}", layer), rule.back(whole) if rule.back else whole)
        assert not held, f"of no published tensor: {sorted(held)[:4]}"
        writer.finish()
        return whole.dtype


def _tensors(native: Native) -> Iterator[tuple[Rule, str]]:
    """Every published tensor's rule and layer."""
    layers = range(int(str(native.config["num_hidden_layers"])))
    for rule in native.rules:
        assert rule.change is None, "an own class takes all numbers as they were published"
        for layer in layers if "{n}" in rule.source else range(1):
            yield rule, str(layer)


def _complete(folder: Path, kept: Path, name: str, wanted: tuple[str, ...] = ()) -> None:
    """Adds to a JSON file the published keys (of `wanted`, if any are named) that it does not have."""
    if not (kept / name).is_file():
        return
    ours = read_object(folder / name) if (folder / name).is_file() else {}
    theirs = read_object(kept / name)
    _write(folder / name, {key: theirs[key] for key in theirs if not wanted or key in wanted} | ours)


def _write(file: Path, values: Mapping[str, object]) -> None:
    write_text(file, json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def _said(settings: Settings, folder: Path) -> str:
    auto = settings.values.get("auto_map")
    named = {f"{said.split('.')[0]}.py" for said in auto.values()} if isinstance(auto, dict) else set()
    missing = sorted(file for file in named if not (folder / file).is_file())
    code = ", ".join(sorted(file.name for file in folder.glob("*.py")))
    sentence = f"in the layout {settings.name} was published in ({settings.values['model_type']})"
    if code:
        sentence += f", with its own code ({code})"
    if missing or not code:
        wanted = ", ".join(missing) or "its *.py files"
        sentence += (
            f"; {wanted} did not lie beside the base model: llama.cpp needs none, for vLLM or transformers with "
            "trust_remote_code copy them into the folder"
        )
    return sentence
