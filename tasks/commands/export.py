"""`elastane export`: the tuned model as a folder that plain transformers or PEFT opens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.commands.tuned import step_folder, tuned_folder
from tasks.contracts import FinalManifest, TrainReport, write_text
from tasks.errors import UserError
from tasks.params import Params
from tasks.paths import Paths
from tasks.stage import heartbeat, say
from tasks.trainer.base_model import published_folder

if TYPE_CHECKING:
    import torch

# Largest difference of logits over the largest logit: folding an adapter into half-precision weights rounds them.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
FOUR_BITS = "BitsAndBytesConfig with load_in_4bit, bnb_4bit_quant_type=nf4, bnb_4bit_use_double_quant"
OURS = ("manifest.json", "train_report.json", "train_curves.csv")


def export(
    params: Params,
    paths: Paths,
    output: Path,
    merge: bool,
    version: str | None = None,
    step: int | None = None,
) -> Path:
    """Writes `output` whole or not at all, then opens it as a user would and compares logits with the tuned model.

    Args:
        merge: fold a LoRA adapter into the base and write whole weights; otherwise the adapter alone.
        version: a registered one, `models:/name/3`; None takes `checkpoints/final/`.
        step: a step of the recipe's run whose checkpoint is still there, instead of the last.

    Raises:
        UserError: `output` exists and is not empty, or nothing trained yet.
        RuntimeError: the folder does not give the tuned model's logits; nothing is left of it.
    """
    _check_asked(output, version, step)
    chosen = tuned_folder(params, paths, version) if step is None else step_folder(params, paths, step)
    with chosen as folder:
        with heartbeat("loading the tuned model"):
            from tasks.trainer import loading
            from tasks.trainer.legacy import publish

            final, dtype = loading.read_final(paths, folder), loading.inference_dtype(folder)
            model, _ = loading.load_tuned(paths, folder)
        adapter_only = final.finetuning_type != "full" and not merge
        what = _described(final, adapter_only, model.config.model_type)
        written_back = publish.published_here(paths.base) and not adapter_only
        if written_back:
            publish.check_foldable(model)
        expected = _logits(model)
        with _beside(output) as fresh:
            with heartbeat(f"writing {output}"):
                if adapter_only or final.finetuning_type == "full":
                    shutil.copytree(folder, fresh, ignore=shutil.ignore_patterns(*OURS), dirs_exist_ok=True)
                    if adapter_only and final.base.added_tokens:
                        _add_tables(paths, final, folder, fresh)
                else:
                    _write_merged(model, final, paths, folder, fresh)
                _write_small_files(paths, final, fresh)
                if written_back:
                    what += " " + publish.write_back(paths.base, fresh, final.base.name_or_path)
            del model
            with heartbeat("opening the export again"):
                told = _logits(_reopened(paths, final, fresh, dtype))
            difference, scale = float((told - expected).abs().max()), float(expected.abs().max())
            _judge(difference, scale, TrainReport.read(folder / "train_report.json").precision)
    say(
        f"export: {what} in {output}; logits differ from the tuned model's by at most "
        f"{difference:.1e} of {scale:.1f}"
    )
    if adapter_only and final.finetuning_type == "qlora":
        _say_on_bitsandbytes(paths, final, output, expected, dtype)
    return output


def _check_asked(output: Path, version: str | None, step: int | None) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(
            f"{output} is there and not empty, and export overwrites nothing; name another folder"
        )
    if version and step is not None:
        raise UserError(f"--model {version} and --step {step} name two models; leave one out")


def _say_on_bitsandbytes(
    paths: Paths, final: FinalManifest, output: Path, expected: torch.Tensor, dtype: torch.dtype
) -> None:
    with heartbeat("opening it on a base in bitsandbytes' 4 bits"):
        told = _logits(_on_bitsandbytes(paths, final, output, dtype))
    say(
        f"  on a base that bitsandbytes holds in 4 bits ({FOUR_BITS}) they differ by at most "
        f"{float((told - expected).abs().max()):.1e}: its scales are a step off here and there from those that the "
        "adapter was trained on, which --merge keeps"
    )


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


def _add_tables(paths: Paths, final: FinalManifest, folder: Path, fresh: Path) -> None:
    """Puts the tables with rows for added tokens, which the adapter's base lacks, beside the adapter as PEFT does."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import load_file, save_file

    from tasks.trainer import loading

    model = loading.read_tuned(paths, folder, loading.trained_dtype(folder))
    tied = {id(weight): name for name, weight in model.named_parameters(remove_duplicate=False)}
    names = set(tied.values())  # one of each
    file = fresh / "adapter_model.safetensors"
    held = load_file(file)
    every = get_peft_model_state_dict(model, save_embedding_layers=True)
    tables = {name: value for name, value in every.items() if name not in held and name in names}
    save_file({**held, **tables}, file, metadata={"format": "pt"})


def _write_small_files(paths: Paths, final: FinalManifest, fresh: Path) -> None:
    """Tokenizer, chat template and generation config as the base has them, byte for byte; dropout as in its config."""
    from tasks.trainer.loading import is_dropout
    from tasks.trainer.model_source import beside_weights, code_files

    code = code_files(paths.base) if final.base.trust_remote_code else []
    for file in (*beside_weights(paths.base).values(), *code):
        shutil.copyfile(file, fresh / file.name)
    if (fresh / "config.json").is_file():
        base = json.loads((paths.base / "config.json").read_text(encoding="utf-8"))
        config = json.loads((fresh / "config.json").read_text(encoding="utf-8"))
        config |= {key: value for key, value in base.items() if is_dropout(key)}
        write_text(fresh / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
    for weights in fresh.glob("*.safetensors"):
        weights.chmod(0o644)


# --- opening ------------------------------------------------------------------------------------


def _reopened(paths: Paths, final: FinalManifest, fresh: Path, dtype: torch.dtype) -> Any:
    """The export as plain libraries open it; an adapter of qlora on the very 4 bits it was trained on."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from tasks.trainer.legacy import publish
    from tasks.trainer.loading import load_base_of
    from tasks.trainer.placement import place

    if (fresh / "config.json").is_file() and publish.published_here(paths.base):
        return place(publish.open_again(fresh, final.base.name_or_path, dtype))
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": final.base.trust_remote_code}
    if (fresh / "config.json").is_file():
        return place(AutoModelForCausalLM.from_pretrained(fresh, **options))
    if final.finetuning_type == "qlora":
        base = load_base_of("qlora", paths, dtype)
    else:
        base = _with_rows(
            AutoModelForCausalLM.from_pretrained(published_folder(final.base, paths), **options), final
        )
    return place(PeftModel.from_pretrained(base, fresh))


def _with_rows(base: Any, final: FinalManifest) -> Any:
    """A published base with as many rows as the adapter's tables have, which then fill them."""
    if final.base.added_tokens:
        base.resize_token_embeddings(final.base.vocabulary, mean_resizing=False)
    return base


def _on_bitsandbytes(paths: Paths, final: FinalManifest, folder: Path, dtype: torch.dtype) -> Any:
    """An adapter of qlora on a base as QLoRA's users load it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from tasks.trainer.placement import device

    asked = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    base = AutoModelForCausalLM.from_pretrained(
        published_folder(final.base, paths),
        quantization_config=asked,
        dtype=dtype,
        device_map="auto" if device().type == "cuda" else "cpu",
        trust_remote_code=final.base.trust_remote_code,
    )
    return PeftModel.from_pretrained(_with_rows(base, final), folder).eval()


def _logits(model: Any) -> torch.Tensor:
    """Logits (1, 16, vocabulary) on the first sixteen token ids, float32 on the CPU."""
    import torch

    from tasks.trainer.placement import device

    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.arange(16, device=device())[None]).logits
        return logits.float().cpu()


def _judge(difference: float, scale: float, precision: str) -> None:
    if not difference <= TOLERANCE[precision] * max(1.0, scale):
        raise RuntimeError(f"the export's logits differ from the tuned model's by {difference:.2e}")


def _described(final: FinalManifest, adapter_only: bool, family: str) -> str:
    if not adapter_only:
        return "whole weights"
    base = final.base
    said = f"adapter for {base.name_or_path}"
    if base.added_tokens and base.kind in ("folder", "hub"):
        said += f" (first `base.resize_token_embeddings({base.vocabulary})`: it has {base.added_tokens} token(s) more)"
    elif base.weights == "here" and base.kind in ("folder", "hub"):
        said += (
            f" as converted to {family}: its layers have other names and shapes than the published model's, "
            "which it does not fit; --merge writes a model that needs no other"
        )
    elif base.weights == "here":
        said += " (converted, in data/base)"
    return said
