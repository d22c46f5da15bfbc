"""Writes a legacy checkpoint as a native one, a tensor at a time, after everything that may be wrong was looked at."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import tasks.trainer.llama_alibi  # noqa: F401 (which makes the class known to transformers)
from tasks.contracts import write_text
from tasks.errors import UserError
from tasks.stage import lively, say
from tasks.trainer.legacy.checkpoint import SHARD_BYTES, Writer, shapes, tensors, weight_files
from tasks.trainer.legacy.probes import TEXTS
from tasks.trainer.legacy.table import KEPT, Family, Native, Rule, Settings, read_object

SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "max_new_tokens")
PUBLISHED = ("config.json", "generation_config.json", "tokenizer_config.json", "*.py")
# Left out, a class takes ids of its own vocabulary, and a padding id keeps that row of the embedding from learning.
# The tokenizer and generation_config.json say them.
NO_IDS: dict[str, object] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
KINDS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Step:
    """A published tensor's rule, and its targets' names with this layer's number."""

    rule: Rule
    targets: tuple[str, ...]

    def parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        changed = self.rule.change(tensor) if self.rule.change else tensor
        return list(changed.split(list(self.rule.rows))) if self.rule.rows else [changed]


def convert(family: Family, source: Path, name: str, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes config, tokenizer, generation config and weights of the native model into `folder`.

    Of a class of this project the published small files are kept besides, since exports are written back with them.
    Host memory: one written file's worth (`shard_bytes`), one tensor, and pages of the source that the system may
    drop. The numbers keep their type.

    Args:
        name: what the user calls the model.

    Raises:
        UserError: an option, a tensor, a shape or a tokenizer that cannot be converted; nothing is left in `folder`.
    """
    settings = Settings.read(source, name)
    native = family.native(settings)
    say(
        f"{name}: converting {family.model_type} to {native.config['model_type']}, once; its own code is not run"
    )
    for note in native.notes:
        say(f"  {note}")
    try:
        files = weight_files(source)
        steps, size = _plan(native, files, name)
        _write_config(native, settings, folder)
        tokenizer = family.tokenizer(source, settings)
        _write_tokenizer(tokenizer, settings, folder)
        _write_generation(family.ends(tokenizer), tokenizer, source, folder)
        free = shutil.disk_usage(folder).free
        if size > free:
            raise UserError(
                f"{folder.parent} has {free / 1e9:.1f} GB free and the converted {name} takes {size / 1e9:.1f}; "
                "make room"
            )
        _write_weights(files, steps, size, Writer(folder, shard_bytes))
        if native.own:
            _keep_published(family, source, folder / KEPT)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _plan(native: Native, files: list[Path], name: str) -> tuple[Mapping[str, Step | None], int]:
    """Every published tensor's step (None: dropped) and the bytes that they come to.

    Raises:
        UserError: a tensor is unknown, of another shape or type, there twice, or missing.
    """
    wanted = _wanted(native)
    rules = [(_pattern(rule.source), rule) for rule in native.rules]
    dropped = [_pattern(source) for source in native.dropped]
    steps: dict[str, Step | None] = {}
    made: dict[str, str] = {}
    unknown: list[str] = []
    size = 0
    for file in files:
        for source, (shape, kind) in shapes(file).items():
            if source in steps:
                raise UserError(f"{name}: {source} is in two of its files; fetch the model anew")
            if any(pattern.fullmatch(source) for pattern in dropped):
                steps[source] = None
                continue
            step = _step(source, rules)
            if step is None or not all(target in wanted for target in step.targets):
                unknown.append(f"{source} {list(shape)}")
                continue
            _check(step, source, shape, kind, wanted, name)
            steps[source] = step
            made.update(dict.fromkeys(step.targets, source))
            size += shape.numel() * kind.itemsize
    if unknown:
        raise UserError(
            f"{name} has {len(unknown)} tensors that its layout does not ({', '.join(unknown[:4])}), so it is another "
            "model than its config.json says; take the published weights"
        )
    missing = sorted(wanted.keys() - made.keys())
    if missing:
        raise UserError(
            f"{name} lacks {len(missing)} tensors ({', '.join(missing[:4])} could not be made); fetch the whole model"
        )
    return steps, size


def _wanted(native: Native) -> dict[str, torch.Size]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(_config(native))
    return {name: value.shape for name, value in model.state_dict().items()}


def _pattern(source: str) -> re.Pattern[str]:
    return re.compile(re.escape(source).replace(r"\{n\}", r"(\d+)"))


def _step(source: str, rules: list[tuple[re.Pattern[str], Rule]]) -> Step | None:
    for pattern, rule in rules:
        found = pattern.fullmatch(source)
        if found:
            layer = found.group(1) if pattern.groups else ""
            return Step(rule, tuple(target.replace("{n}", layer) for target in rule.targets))
    return None


def _check(
    step: Step, source: str, shape: torch.Size, kind: torch.dtype, wanted: Mapping[str, torch.Size], name: str
) -> None:
    rows = step.rule.rows or (wanted[step.targets[0]][0],)
    expected = torch.Size((sum(rows), *wanted[step.targets[0]][1:]))
    if shape != expected:
        raise UserError(
            f"{name}: {source} is {list(shape)} where config.json makes it {list(expected)}; take weights and config "
            "of one model"
        )
    if kind not in KINDS:
        raise UserError(
            f"{name}: {source} is {str(kind).removeprefix('torch.')}, so quantised or packed; take the model in half "
            "precision"
        )


def _config(native: Native) -> Any:
    values = {**native.config, **NO_IDS}
    return AutoConfig.for_model(str(values.pop("model_type")), **values)


def _write_config(native: Native, settings: Settings, folder: Path) -> None:
    config = _config(native)
    with torch.device("meta"):
        config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
    config.save_pretrained(folder)
    written = read_object(folder / "config.json")
    written.pop("_name_or_path", None)
    kind = settings.values.get("dtype", settings.values.get("torch_dtype"))
    write_text(
        folder / "config.json",
        json.dumps(written | NO_IDS | ({"dtype": kind} if kind else {}), indent=2, sort_keys=True) + "\n",
    )


def _write_tokenizer(tokenizer: PreTrainedTokenizerFast, settings: Settings, folder: Path) -> None:
    """Saved, loaded as the pipeline will, and asked whether it is still the same."""
    rows = read_object(folder / "config.json")["vocab_size"]
    if len(tokenizer) > int(str(rows)):
        raise UserError(
            f"{settings.name}: its tokenizer has {len(tokenizer)} tokens and its embedding {rows} rows; take the "
            "tokenizer that was published with the weights"
        )
    tokenizer.model_max_length = int(str(read_object(folder / "config.json")["max_position_embeddings"]))
    tokenizer.save_pretrained(folder)
    again = AutoTokenizer.from_pretrained(folder)
    one, other = tokenizer.backend_tokenizer, again.backend_tokenizer
    changed = [text for text in TEXTS if one.encode(text).ids != other.encode(text).ids]
    assert not changed and again.chat_template == tokenizer.chat_template, "saved otherwise than it was made"


def _write_generation(
    ends: list[int], tokenizer: PreTrainedTokenizerFast, source: Path, folder: Path
) -> None:
    file = source / "generation_config.json"
    said = read_object(file) if file.is_file() else {}
    values: dict[str, object] = {key: said[key] for key in SAMPLING if said.get(key) is not None}
    values |= {"eos_token_id": ends if len(ends) > 1 else ends[0]}
    for key in ("bos_token_id", "pad_token_id"):
        if getattr(tokenizer, key) is not None:
            values[key] = getattr(tokenizer, key)
    write_text(folder / file.name, json.dumps(values, indent=2, sort_keys=True) + "\n")


def _keep_published(family: Family, source: Path, folder: Path) -> None:
    folder.mkdir()
    for pattern in (*PUBLISHED, *family.reads):
        for file in source.glob(pattern):
            shutil.copyfile(file, folder / file.name)


def _write_weights(files: list[Path], steps: Mapping[str, Step | None], size: int, writer: Writer) -> None:
    bar = tqdm(total=size, unit="B", unit_scale=True, desc="converting", mininterval=0.5)
    with bar, lively(bar):
        for file in files:
            for source, tensor in tensors(file):
                step = steps[source]
                if step is None:
                    continue
                for target, part in zip(step.targets, step.parts(tensor), strict=True):
                    writer.add(target, part)
                bar.update(tensor.numel() * tensor.element_size())
        writer.finish()
