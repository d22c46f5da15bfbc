"""`data/base/`: the base model as the rest of the pipeline finds it, and the way back to its weights."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from tasks.contracts import BaseModelRef, write_text
from tasks.errors import UserError
from tasks.params import ModelParams
from tasks.paths import Paths
from tasks.stage import heartbeat, say
from tasks.trainer.legacy.registry import converts
from tasks.trainer.model_source import SMALL_FILES, Source, code_files, find_source, folder_hash, source_hash


def ensure_base(model: ModelParams, paths: Paths) -> BaseModelRef:
    """Brings `data/base/` up to date: base.json, config, tokenizer, and converted weights if need be.

    Does nothing when it already holds this model. Written beside and renamed: never half there.

    Raises:
        UserError: the model is not found or has no weights.
    """
    present = BaseModelRef.read(paths.base_ref) if paths.base_ref.is_file() else None
    source = find_source(_at_the_known_commit(model, present))
    if source.path.is_dir():
        with heartbeat(f"hashing the weights in {source.path.name}"):
            identity = source_hash(source, model.trust_remote_code)
    else:
        identity = source_hash(source, False)
    _say_what_is_run(model, source.path)
    ref = BaseModelRef(
        name_or_path=model.name_or_path,
        revision=model.revision,
        kind=source.kind,
        weights="here"
        if source.path.is_file() or converts(source.path, model.trust_remote_code)
        else "source",
        content_hash=identity,
        source_hash=identity,
        trust_remote_code=model.trust_remote_code,
        commit=source.commit,
    )
    if present is not None and ref.model_copy(update={"content_hash": present.content_hash}) == present:
        return present
    if source.commit:
        say(f"{model.name_or_path}: commit {source.commit}, kept to from now on (data/base/base.json)")
    return _write(ref, source, paths)


def _at_the_known_commit(model: ModelParams, present: BaseModelRef | None) -> ModelParams:
    """A branch moves on at the hub; what was fetched for this name and revision once is what they mean here."""
    if present is None or present.commit is None:
        return model
    if (present.name_or_path, present.revision) != (model.name_or_path, model.revision):
        return model
    return model.model_copy(update={"revision": present.commit})


def _say_what_is_run(model: ModelParams, folder: Path) -> None:
    code = ", ".join(file.name for file in code_files(folder))
    if model.trust_remote_code and code:
        say(
            f"running the code that comes with {model.name_or_path} ({code}): model.trust_remote_code is true"
        )


def _write(ref: BaseModelRef, source: Source, paths: Paths) -> BaseModelRef:
    fresh = paths.base.with_name(f".{paths.base.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    old = converts(source.path, ref.trust_remote_code)
    if ref.weights == "here":
        if old:
            from tasks.trainer.legacy.convert import convert

            convert(old, source.path, ref.name_or_path, fresh)
        else:
            convert_gguf(source.path, fresh)
        ref = ref.model_copy(update={"content_hash": folder_hash(fresh, False)})
    else:
        small = [file for pattern in SMALL_FILES for file in source.path.glob(pattern)]
        for file in [*small, *(code_files(source.path) if ref.trust_remote_code else ())]:
            if not file.name.endswith(".index.json"):
                shutil.copyfile(file, fresh / file.name)
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
        name_or_path=ref.name_or_path,
        revision=ref.commit or ref.revision,
        trust_remote_code=ref.trust_remote_code,
    )
    source = find_source(model)
    if source_hash(source, ref.trust_remote_code) != ref.source_hash:
        what = "weights or code" if ref.trust_remote_code else "weights"
        raise UserError(
            f"the {what} of {ref.name_or_path} are not those the data was prepared for; "
            "run `dvc repro -f prepare_data` to take the new ones"
        )
    if os.environ.get("RANK", "0") == "0":
        _say_what_is_run(model, source.path)
    return source.path
