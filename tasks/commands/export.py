"""`elastane export`: the tuned model as a folder that plain transformers or PEFT opens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.commands.tuned import tuned_folder
from tasks.contracts import FinalManifest, TrainReport, write_text
from tasks.errors import UserError
from tasks.params import Params
from tasks.paths import Paths
from tasks.stage import heartbeat, say

if TYPE_CHECKING:
    import torch

# Largest difference of logits over the largest logit: folding an adapter into half-precision weights rounds them.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
# bitsandbytes' own 4 bits are a step off here and there from those that adapters are trained on.
TOLERANCE_NF4 = 5e-2
OURS = ("manifest.json", "train_report.json", "train_curves.csv")
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "*.jinja")
TOKENIZER_FILES += ("vocab*", "merges.txt", "*.model", "generation_config.json", "LICENSE*")


def export(params: Params, paths: Paths, output: Path, merge: bool, version: str | None = None) -> Path:
    """Writes `output` whole or not at all, then opens it as a user would and compares logits with the tuned model.

    Args:
        merge: fold a LoRA adapter into the base and write whole weights; otherwise the adapter alone.
        version: a registered one, `models:/name/3`; None takes `checkpoints/final/`.

    Raises:
        UserError: `output` exists and is not empty, or nothing trained yet.
        RuntimeError: the folder does not give the tuned model's logits; nothing is left of it.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(
            f"{output} is there and not empty, and export overwrites nothing; name another folder"
        )
    with tuned_folder(params, paths, version) as folder, _beside(output) as fresh:
        with heartbeat("loading the tuned model"):
            from tasks.trainer import loading

            final = loading.read_final(paths, folder)
            model, _ = loading.load_tuned(paths, folder)
        adapter_only = final.finetuning_type != "full" and not merge
        expected = _logits(model)
        with heartbeat(f"writing {output}"):
            if adapter_only or final.finetuning_type == "full":
                shutil.copytree(folder, fresh, ignore=shutil.ignore_patterns(*OURS), dirs_exist_ok=True)
            else:
                _write_merged(model, final, paths, folder, fresh)
            _write_small_files(paths, final, fresh)
        del model
        with heartbeat("opening the export again"):
            difference = float((_logits(_reopened(paths, folder, final, fresh)) - expected).abs().max())
        _judge(difference, float(expected.abs().max()), final, folder, adapter_only)
    say(
        f"export: {_described(final, adapter_only)} in {output}; opened as {_way(final, adapter_only)}, its logits "
        f"differ from the tuned model's by at most {difference:.1e} (the largest is {float(expected.abs().max()):.1f})"
    )
    return output


@contextmanager
def _beside(output: Path) -> Iterator[Path]:
    """A new folder beside `output`, which takes its place at the end, or is removed."""
    fresh = output.with_name(f".{output.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        yield fresh
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    if output.exists():
        output.rmdir()
    fresh.rename(output)


# --- writing ------------------------------------------------------------------------------------


def _write_merged(model: Any, final: FinalManifest, paths: Paths, folder: Path, fresh: Path) -> None:
    """Whole weights, in the precision of the run; qlora's adapter is folded into the very numbers it was trained on."""
    from tasks.trainer import loading
    from tasks.trainer.quantize import dequantize

    dtype = loading.inference_dtype(folder)
    if hasattr(model.get_base_model(), "hf_device_map"):  # dealt out: merging needs every weight at hand
        model = loading.read_tuned(paths, folder, dtype)
    if final.finetuning_type == "qlora":
        dequantize(model, dtype)
    merged = model.merge_and_unload()
    merged.to(loading.trained_dtype(folder)).save_pretrained(fresh)


def _write_small_files(paths: Paths, final: FinalManifest, fresh: Path) -> None:
    """Tokenizer, chat template and generation config as the base has them, byte for byte; dropout as in its config."""
    from tasks.trainer.loading import is_dropout
    from tasks.trainer.model_source import CODE_FILES

    patterns = (*TOKENIZER_FILES, *(CODE_FILES if final.base.trust_remote_code else ()))
    for file in {file for pattern in patterns for file in paths.base.glob(pattern) if file.is_file()}:
        shutil.copyfile(file, fresh / file.name)
    if (fresh / "config.json").is_file():
        base = json.loads((paths.base / "config.json").read_text(encoding="utf-8"))
        config = json.loads((fresh / "config.json").read_text(encoding="utf-8"))
        config |= {key: value for key, value in base.items() if is_dropout(key)}
        write_text(fresh / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
    for weights in fresh.glob("*.safetensors"):
        weights.chmod(0o644)


# --- opening ------------------------------------------------------------------------------------


def _reopened(paths: Paths, folder: Path, final: FinalManifest, fresh: Path) -> Any:
    """The export as plain libraries open it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from tasks.trainer import loading
    from tasks.trainer.base_model import weights_folder
    from tasks.trainer.placement import place

    dtype, own_code = loading.inference_dtype(folder), final.base.trust_remote_code
    if (fresh / "config.json").is_file():
        return place(AutoModelForCausalLM.from_pretrained(fresh, dtype=dtype, trust_remote_code=own_code))
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": own_code}
    if final.finetuning_type == "qlora":
        options |= _in_four_bits(dtype)
    base = AutoModelForCausalLM.from_pretrained(weights_folder(final.base, paths), **options)
    adapted = PeftModel.from_pretrained(base, fresh)
    return adapted.eval() if final.finetuning_type == "qlora" else place(adapted)


def _in_four_bits(dtype: torch.dtype) -> dict[str, Any]:
    """The base as QLoRA's users load it, by bitsandbytes."""
    from transformers import BitsAndBytesConfig

    from tasks.trainer.placement import device

    asked = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": asked, "device_map": {"": device()} if device().type == "cpu" else "auto"}


def _logits(model: Any) -> torch.Tensor:
    """Logits (1, 16, vocabulary) on the first sixteen token ids, float32 on the CPU."""
    import torch

    from tasks.trainer.placement import device

    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.arange(16, device=device())[None]).logits
        return logits.float().cpu()


def _judge(difference: float, scale: float, final: FinalManifest, folder: Path, adapter_only: bool) -> None:
    precision = TrainReport.read(folder / "train_report.json").precision
    allowed = TOLERANCE.get(precision, TOLERANCE["float32"])
    if adapter_only and final.finetuning_type == "qlora":
        allowed = max(allowed, TOLERANCE_NF4)
    if not difference <= allowed * max(1.0, scale):
        raise RuntimeError(f"the export's logits differ from the tuned model's by {difference:.2e}")


# --- words --------------------------------------------------------------------------------------


def _described(final: FinalManifest, adapter_only: bool) -> str:
    if not adapter_only:
        return "whole weights"
    here = " (converted, in data/base)" if final.base.weights == "here" else ""
    return f"adapter for {final.base.name_or_path}{here}"


def _way(final: FinalManifest, adapter_only: bool) -> str:
    if not adapter_only:
        return "a Hugging Face model"
    if final.finetuning_type != "qlora":
        return "a PEFT adapter"
    return (
        "a PEFT adapter on a base in bitsandbytes' 4 bits (BitsAndBytesConfig with load_in_4bit, "
        "bnb_4bit_quant_type=nf4, bnb_4bit_use_double_quant), whose scales are a step off here and there"
    )
