"""`elastane export`: the tuned model as a folder that plain transformers or PEFT opens."""

from __future__ import annotations

import shutil
from pathlib import Path

from tasks.errors import UserError
from tasks.params import Params
from tasks.paths import Paths
from tasks.stage import heartbeat, say

# Largest difference of logits over the largest logit: folding an adapter into half-precision weights rounds them.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
NF4_ELSEWHERE = "BitsAndBytesConfig with load_in_4bit, bnb_4bit_quant_type=nf4, bnb_4bit_use_double_quant"


def export(params: Params, paths: Paths, output: Path, merge: bool) -> Path:
    """Writes `output` whole or not at all, then opens it again and compares logits with the tuned model.

    Args:
        merge: fold a LoRA adapter into the base and write whole weights; otherwise the adapter alone.

    Raises:
        UserError: `output` exists and is not empty, or nothing trained yet.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(
            f"{output} is there and not empty, and export overwrites nothing; name another folder"
        )
    with heartbeat("loading the tuned model"):
        from tasks.trainer import loading
        from tasks.trainer.legacy import publish

        final = loading.read_final(paths)
        model, _ = loading.load_tuned(paths)
    adapter_only = final.finetuning_type != "full" and not merge
    fresh = output.with_name(f".{output.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.parent.mkdir(parents=True, exist_ok=True)
    written_back = publish.published_here(paths.base) and not adapter_only
    if written_back:
        publish.check_foldable(model)
    expected = _logits(model)
    what = "whole weights"
    with heartbeat(f"writing {output}"):
        if adapter_only:
            shutil.copytree(paths.final, fresh)
            for ours in ("manifest.json", "train_report.json", "train_curves.csv"):
                (fresh / ours).unlink()
        else:
            _merged(model, final.finetuning_type, loading.inference_dtype(paths.final)).save_pretrained(fresh)
        loading.save_tokenizer(paths, fresh)
        if written_back:
            what += " " + publish.write_back(paths.base, fresh, final.base.name_or_path)
    with heartbeat("opening the export again"):
        difference = float((_logits(_reopen(paths, fresh, adapter_only)) - expected).abs().max())
    scale = float(expected.abs().max())
    precision = str(loading.inference_dtype(paths.final)).removeprefix("torch.")
    if not difference <= TOLERANCE[precision] * max(1.0, scale):
        shutil.rmtree(fresh)
        raise RuntimeError(f"the export's logits differ from the tuned model's by {difference:.2e}")
    if output.exists():
        output.rmdir()
    fresh.rename(output)
    if adapter_only:
        held = f", held in 4 bits ({NF4_ELSEWHERE})" if final.finetuning_type == "qlora" else ""
        what = f"adapter for {final.base.name_or_path}{held}{_of_converted(final.base, model.config)}"
    say(f"export: {what} in {output}; logits differ from the tuned model's by at most {difference:.1e}")
    return output


def _of_converted(base, config) -> str:  # type: ignore[no-untyped-def]
    """What to say of an adapter whose base was converted from a layout with other layers."""
    if base.weights != "here" or base.kind not in ("folder", "hub"):
        return ""
    return (
        f" as converted to {config.model_type}: its layers have other names and shapes than the published model's, "
        "which it does not fit; --merge writes a model that needs no other"
    )


def _merged(model, method, dtype):  # type: ignore[no-untyped-def]
    """Whole weights; qlora's adapter is folded into the very numbers that it was trained on."""
    from tasks.trainer.quantize import dequantize

    if method == "qlora":
        dequantize(model, dtype)
    return model if method == "full" else model.merge_and_unload()


def _reopen(paths: Paths, folder: Path, adapter_only: bool):  # type: ignore[no-untyped-def]
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from tasks.trainer import loading
    from tasks.trainer.legacy import publish

    dtype = loading.inference_dtype(paths.final)
    if not adapter_only and publish.published_here(paths.base):
        model = publish.open_again(folder, loading.read_final(paths).base.name_or_path, dtype)
    elif adapter_only:
        method = loading.read_final(paths).finetuning_type
        model = PeftModel.from_pretrained(loading.load_base_of(method, paths, dtype), folder)
    else:
        trusted = loading.read_final(paths).base.trust_remote_code
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=trusted)
    return model.to(loading.device()).eval()


def _logits(model):  # type: ignore[no-untyped-def]
    """Logits (1, 16, vocabulary) on the first sixteen token ids, float32 on the CPU."""
    import torch

    with torch.inference_mode():
        return model(input_ids=torch.arange(16, device=model.device)[None]).logits.float().cpu()
