"""Loads models and tokenizers: the base to train on, and what was tuned from it."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch
from accelerate import init_empty_weights
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import get_model_conversion_mapping

import tasks.trainer.llama_alibi  # noqa: F401 (which makes the class known to transformers)
from tasks.contracts import BaseModelRef, FinalManifest, FinetuningType, Precision, TrainReport
from tasks.errors import UserError
from tasks.paths import Paths
from tasks.stage import say
from tasks.trainer.base_model import weights_folder
from tasks.trainer.file_weights import FileWeights, has_files, stored_kind
from tasks.trainer.placement import device, place
from tasks.trainer.quantize import quantize
from tasks.trainer.weights import MetaModel, meta_of

# PEFT still asks transformers by an attribute's old name; nothing a user could do about it.
warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)

DTYPES: dict[Precision, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
DROPOUT_KEYS = ("attn_pdrop", "embd_pdrop", "resid_pdrop")


def stored_precision(method: FinetuningType, precision: Precision) -> Precision:
    """Full tuning keeps float32 masters (float64 in a proof); a frozen base is held in the precision it computes in."""
    return "float32" if method == "full" and precision != "float64" else precision


def loaded_dtype(method: FinetuningType, precision: Precision) -> torch.dtype | None:
    """What the base is loaded as to be trained; None is as its file has it, which NF4 is made of."""
    as_it_is = method == "qlora" and precision != "float64"
    return None if as_it_is else DTYPES[stored_precision(method, precision)]


def load_tokenizer(paths: Paths) -> PreTrainedTokenizerBase:
    trusted = BaseModelRef.read(paths.base_ref).trust_remote_code
    tokenizer = AutoTokenizer.from_pretrained(paths.base, trust_remote_code=trusted)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_base(paths: Paths, dtype: torch.dtype | None) -> PreTrainedModel:
    """The base model whole on the CPU in `dtype` (None: its file's), dropout off so that no plan draws other masks
    than another.
    """
    folder, config, trusted = _described(paths)
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=dtype or "auto", trust_remote_code=trusted
    )
    return _ending_as_learnt(model, paths)


def _ending_as_learnt(model: PreTrainedModel, paths: Paths) -> PreTrainedModel:
    """With the generation config of `data/base/`, which knows the end mark of the chat template."""
    if (paths.base / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(paths.base)
    return model


def open_base(paths: Paths, dtype: torch.dtype | None) -> MetaModel:
    """What `load_base` gives, without its numbers, which are read from the files as they are asked for.

    Where files cannot be read tensor by tensor, the model is loaded whole and says so.

    Raises:
        UserError: a file, a tensor or its shape is wrong.
    """
    folder, config, trusted = _described(paths)
    reason = _why_loaded(folder, config, trusted)
    if reason is None:
        model = meta_model(config, dtype or config.dtype or stored_kind(folder))
        reason = _why_converted(model)
    if reason is None:
        weights = FileWeights(folder, model)
        if not weights.unlike:
            model.generation_config = _generation_config(folder)
            return MetaModel(_ending_as_learnt(model, paths), weights)
        reason = "{} and {} are one by its config.json and differ in its files".format(*weights.unlike[0])
    if os.environ.get("RANK", "0") == "0":
        say(f"every rank loads the whole model into host memory first: {reason}")
    return meta_of(load_base(paths, dtype))


def _described(paths: Paths) -> tuple[Path, PretrainedConfig, bool]:
    """The base's folder, its config without dropout, and whether its own code may run."""
    ref = BaseModelRef.read(paths.base_ref)
    folder = weights_folder(ref, paths)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=ref.trust_remote_code)
    for key in filter(is_dropout, list(vars(config))):
        setattr(config, key, 0.0)
    return folder, config, ref.trust_remote_code


def _why_loaded(folder: Path, config: PretrainedConfig, trusted: bool) -> str | None:
    """Why its files cannot be read tensor by tensor, as far as config.json says; or None."""
    if trusted and getattr(config, "auto_map", None):
        return "its own code makes it, and loads it"
    if getattr(config, "quantization_config", None):
        return "its files are quantised"
    return None if has_files(folder) else "its files are not named as transformers names them"


def _why_converted(model: PreTrainedModel) -> str | None:
    """Why a tensor of the files is not one of the model; or None."""
    if get_model_conversion_mapping(model, add_legacy=False):
        return f"transformers makes the tensors of {type(model).__name__} from others while it loads them"
    if model._keep_in_fp32_modules or model._keep_in_fp32_modules_strict:
        return f"transformers keeps some weights of {type(model).__name__} in float32"
    return None


def meta_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """A causal language model with parameters on the meta device and buffers that are real."""
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()  # each name was given a parameter of its own
    return model


def _generation_config(folder: Path) -> GenerationConfig:
    """As `from_pretrained` finds it; in older models config.json says it."""
    try:
        return GenerationConfig.from_pretrained(folder)
    except OSError:
        return GenerationConfig.from_pretrained(
            folder, config_file_name="config.json", _from_model_config=True
        )


def is_dropout(key: str) -> bool:
    """Whether a key of a model's config is a probability of dropout."""
    return "dropout" in key or key in DROPOUT_KEYS


def load_base_of(method: FinetuningType, paths: Paths, dtype: torch.dtype) -> PreTrainedModel:
    """The base that adapters were trained on, on the CPU, to be used in `dtype`: for qlora the same NF4."""
    if method != "qlora":
        return load_base(paths, dtype)
    base = load_base(paths, None)
    quantize(base, dtype, device(), torch.device("cpu"))
    return base


def base_dtype() -> torch.dtype:
    """What the base alone runs in: bfloat16 on GPUs that have it, else float32."""
    return torch.bfloat16 if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else torch.float32


def inference_dtype(folder: Path) -> torch.dtype:
    """The precision it was trained in on a GPU; float32 on a CPU, where the others are slow."""
    return trained_dtype(folder) if torch.cuda.is_available() else torch.float32


def trained_dtype(folder: Path) -> torch.dtype:
    """The precision of the run whose model lies in `folder`."""
    return DTYPES[TrainReport.read(folder / "train_report.json").precision]


def read_final(paths: Paths, folder: Path | None = None) -> FinalManifest:
    """What `checkpoints/final/` (or another such `folder`) holds.

    Raises:
        UserError: nothing trained yet, or trained from another base than `data/base/` now holds.
    """
    folder = folder or paths.final
    if not (folder / "manifest.json").is_file():
        raise UserError(f"{folder} holds no trained model yet; run `elastane run` first")
    final = FinalManifest.read(folder / "manifest.json")
    here = BaseModelRef.read(paths.base_ref)
    if final.base.content_hash != here.content_hash:
        if (final.base.source_hash, final.base.name_or_path) == (here.source_hash, here.name_or_path):
            raise UserError(
                f"{folder} was tuned from {here.name_or_path} with {final.base.vocabulary} rows in its tables, and "
                f"data/base now holds it with {here.vocabulary}, since its tokenizer has other tokens; run "
                "`elastane run` to train on it, or `dvc checkout` to go back"
            )
        raise UserError(
            f"{folder} was tuned from {final.base.name_or_path}, but data/base now holds another model; "
            "run `elastane run` to train on it, or `dvc checkout` to go back"
        )
    return final


def load_tuned(paths: Paths, folder: Path | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The tuned model, ready to answer (see `place`), and its tokenizer.

    An adapter comes as a PEFT model, whose `disable_adapter()` gives the base.

    Args:
        folder: where it lies, `checkpoints/final/` unless said otherwise.
    """
    folder = folder or paths.final
    return place(read_tuned(paths, folder, inference_dtype(folder))), load_tokenizer(paths)


def read_tuned(paths: Paths, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The tuned model on the CPU in `dtype`."""
    final = read_final(paths, folder)
    if final.finetuning_type == "full":
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, trust_remote_code=final.base.trust_remote_code
        )
        return _ending_as_learnt(model, paths)
    from peft import PeftModel

    return PeftModel.from_pretrained(load_base_of(final.finetuning_type, paths, dtype), folder)
