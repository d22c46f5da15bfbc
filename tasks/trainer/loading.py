"""Loads models and tokenizers: the base to train on, and what was tuned from it."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tasks.contracts import BaseModelRef, FinalManifest, FinetuningType, Precision, TrainReport
from tasks.errors import UserError
from tasks.paths import Paths
from tasks.trainer.base_model import weights_folder
from tasks.trainer.quantize import quantize

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


def device() -> torch.device:
    """Where a single process works: the first visible GPU, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def load_tokenizer(paths: Paths) -> PreTrainedTokenizerBase:
    trusted = BaseModelRef.read(paths.base_ref).trust_remote_code
    tokenizer = AutoTokenizer.from_pretrained(paths.base, trust_remote_code=trusted)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_base(paths: Paths, dtype: torch.dtype | None) -> PreTrainedModel:
    """The base model on the CPU in `dtype` (None: its file's), dropout off so that no plan draws other masks than
    another.
    """
    ref = BaseModelRef.read(paths.base_ref)
    folder = weights_folder(ref, paths)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=ref.trust_remote_code)
    for key in list(vars(config)):
        if "dropout" in key or key in DROPOUT_KEYS:
            setattr(config, key, 0.0)
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=dtype or "auto", trust_remote_code=ref.trust_remote_code
    )
    return _ending_as_learnt(model, paths)


def _ending_as_learnt(model: PreTrainedModel, paths: Paths) -> PreTrainedModel:
    """With the generation config of `data/base/`, which knows the end mark of the chat template."""
    if (paths.base / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(paths.base)
    return model


def load_base_of(method: FinetuningType, paths: Paths, dtype: torch.dtype) -> PreTrainedModel:
    """The base that adapters were trained on, to be used in `dtype`: for qlora the same NF4, on this device."""
    if method != "qlora":
        return load_base(paths, dtype)
    base = load_base(paths, None)
    quantize(base, dtype, device(), device())
    return base


def base_dtype() -> torch.dtype:
    """What the base alone runs in: bfloat16 on GPUs that have it, else float32."""
    return torch.bfloat16 if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else torch.float32


def inference_dtype(folder: Path) -> torch.dtype:
    """The precision it was trained in on a GPU; float32 on a CPU, where the others are slow."""
    if not torch.cuda.is_available():
        return torch.float32
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
    if final.base.content_hash != BaseModelRef.read(paths.base_ref).content_hash:
        raise UserError(
            f"{folder} was tuned from {final.base.name_or_path}, but data/base now holds another model; "
            "run `elastane run` to train on it, or `dvc checkout` to go back"
        )
    return final


def load_tuned(paths: Paths, folder: Path | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The tuned model in eval mode on this process's device, and its tokenizer.

    An adapter comes as a PEFT model, whose `disable_adapter()` gives the base.

    Args:
        folder: where it lies, `checkpoints/final/` unless said otherwise.
    """
    folder = folder or paths.final
    final = read_final(paths, folder)
    dtype = inference_dtype(folder)
    if final.finetuning_type != "full":
        from peft import PeftModel

        model = PeftModel.from_pretrained(load_base_of(final.finetuning_type, paths, dtype), folder)
    else:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, trust_remote_code=final.base.trust_remote_code
        )
        model = _ending_as_learnt(model, paths)
    return model.to(device()).eval(), load_tokenizer(paths)


def save_tokenizer(paths: Paths, folder: Path) -> None:
    """Copies the base's tokenizer, chat template and generation config beside exported weights."""
    load_tokenizer(paths).save_pretrained(folder)
    generation = paths.base / "generation_config.json"
    if generation.is_file():
        (folder / generation.name).write_bytes(generation.read_bytes())
