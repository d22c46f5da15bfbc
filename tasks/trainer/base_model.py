"""`data/base/`: the base model as the rest of the pipeline finds it, and the way back to its weights."""

from __future__ import annotations

import filecmp
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
from tasks.trainer.model_source import (
    SMALL_FILES,
    Source,
    beside_weights,
    code_files,
    find_source,
    folder_hash,
    source_hash,
)


def ensure_base(model: ModelParams, paths: Paths, highest: int | None = None) -> BaseModelRef:
    """Brings `data/base/` up to date: base.json, config, tokenizer, and converted weights if need be.

    Does nothing when it already holds this model. Written beside and renamed: never half there.

    Args:
        highest: the largest token id of the prepared rows. Where the model has no row for it, the base gets one for
            every token of the tokenizer. None leaves the rows as they are.

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
    if present is not None and _still_good(present, ref, source, paths, highest):
        return present
    if source.commit:
        say(f"{model.name_or_path}: commit {source.commit}, kept to from now on (data/base/base.json)")
    return _write(ref, source, paths, highest)


def has_rows(base: BaseModelRef, highest: int) -> bool:
    """Whether rows were added just where the token `highest` needs one."""
    if base.vocabulary is None:
        return True
    return (highest >= base.vocabulary - base.added_tokens) == (base.added_tokens > 0)


def _still_good(
    present: BaseModelRef, ref: BaseModelRef, source: Source, paths: Paths, highest: int | None
) -> bool:
    """Whether what is in data/base is what `ref` asks for, with the rows that `highest` asks for."""
    made = {"content_hash", "vocabulary", "added_tokens", *(("weights",) if present.added_tokens else ())}
    if present.model_copy(update={key: getattr(ref, key) for key in made}) != ref:
        return False
    if ref.weights == "source" and _other_tokenizer(source, paths):
        return False
    return highest is None or has_rows(present, highest)


def _other_tokenizer(source: Source, paths: Paths) -> bool:
    """Whether the tokenizer at the source (or what else goes beside weights) is no longer that in data/base."""
    there, here = beside_weights(source.path), beside_weights(paths.base)
    return there.keys() != here.keys() or not all(
        filecmp.cmp(file, here[name], shallow=False) for name, file in there.items()
    )


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


def _write(ref: BaseModelRef, source: Source, paths: Paths, highest: int | None) -> BaseModelRef:
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
    from tasks.trainer.vocabulary import table_rows

    ref = ref.model_copy(update={"vocabulary": table_rows(fresh)})
    if highest is not None and not has_rows(ref, highest):
        ref = _with_a_row_a_token(ref, source, fresh)
    ref.write(fresh / paths.base_ref.name)
    shutil.rmtree(paths.base, ignore_errors=True)
    fresh.rename(paths.base)
    return ref


def _with_a_row_a_token(ref: BaseModelRef, source: Source, fresh: Path) -> BaseModelRef:
    """Adds rows for tokens that the model has none for. The whole model is written, so that every plan sees one."""
    from tasks.trainer.vocabulary import missing_rows, widen

    missing = missing_rows(fresh, ref.trust_remote_code)
    assert missing is not None, "the tokenizer wrote such a token"
    added = missing.wanted - missing.rows
    say(
        f"{ref.name_or_path}: its tokenizer has {added} token(s) behind the {missing.rows} rows of its embedding table "
        f"({', '.join(missing.tokens[:4])}{', …' if len(missing.tokens) > 4 else ''}), and the data holds such; "
        f"data/base gets the model with {missing.wanted} rows, of which the new ones are the mean of the others"
    )
    given = fresh if ref.weights == "here" else source.path
    widen(given, fresh, missing, ref.trust_remote_code, ref.name_or_path)
    made = {"weights": "here", "vocabulary": missing.wanted, "added_tokens": added}
    return ref.model_copy(update={**made, "content_hash": folder_hash(fresh, ref.trust_remote_code)})


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
    source = find_source(_asked(ref))
    if source_hash(source, ref.trust_remote_code) != ref.source_hash:
        what = "weights or code" if ref.trust_remote_code else "weights"
        raise UserError(
            f"the {what} of {ref.name_or_path} are not those the data was prepared for; "
            "run `dvc repro -f prepare_data` to take the new ones"
        )
    if os.environ.get("RANK", "0") == "0":
        _say_what_is_run(_asked(ref), source.path)
    return source.path


def published_folder(ref: BaseModelRef, paths: Paths) -> Path:
    """The model as others get it under its name, without rows that were added here; data/base if it was converted."""
    if ref.added_tokens and ref.kind in ("folder", "hub"):
        source = find_source(_asked(ref))
        if not converts(source.path, ref.trust_remote_code):
            return source.path
    return weights_folder(ref, paths)


def _asked(ref: BaseModelRef) -> ModelParams:
    return ModelParams(
        name_or_path=ref.name_or_path,
        revision=ref.commit or ref.revision,
        trust_remote_code=ref.trust_remote_code,
    )
