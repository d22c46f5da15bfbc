"""The built-in recipe of certify: models and rows so small that any machine trains them in seconds, made from a seed.

Everything where plans may part ways is in it: rows of other lengths and other numbers of learnt tokens on every rank,
several micro-batches a step, a clip that bites, and a last batch of one row, which leaves ranks without any.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from ruamel.yaml import YAML

import tasks
from tasks.commands.certify_runs import Subject
from tasks.contracts import METHOD_NAMES, DataManifest, FinetuningType
from tasks.data.accounts import LeftOut
from tasks.data.assemble import write_splits
from tasks.data.merge import TRAIN, Merge, Run
from tasks.data.prepared import IGNORED
from tasks.data.rows import Row
from tasks.data.runs import Keyed, RunWriter
from tasks.data.store import content_hash, histogram
from tasks.data.templates import Encoded
from tasks.errors import UserError
from tasks.params import Params, parse_params
from tasks.paths import Paths
from tasks.trainer.base_model import ensure_base

Family = Literal["llama", "mistral", "qwen2", "qwen3", "bloom", "glm", "glm4", "llama_alibi"]
USUAL_FAMILIES: tuple[Family, ...] = ("llama", "qwen2")
ROWS = 17
BATCH = 8
SHORTEST, LONGEST = 6, 48
# Degrees 2 and 4 divide all of it, and there are two layers a chunk of two interleaved stages.
SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 128,
    # Wide enough that attention looks at some tokens more than at others.
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Of which each of four ranks has columns that blocks of 64 fill.
WIDER: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 32}
TIED: tuple[Family, ...] = ("qwen2", "bloom")
# What llama has not.
BESIDE: dict[Family, str] = {
    "qwen2": ", biases, tied embeddings",
    "qwen3": ", norms of query and key",
    "bloom": ", ALiBi, biases, tied embeddings",
    "glm": ", biases, gate and up in one matrix",
    "glm4": ", biases, gate and up in one matrix, four norms a layer",
}
RECIPE: dict[str, Any] = {
    "seed": 7,
    "model.revision": None,
    "model.trust_remote_code": False,
    "prepare_data.source": "tiny",
    "probe_hardware.device": "auto",
    "train.lora": {"rank": 4, "alpha": 8, "targets": "all-linear", "train_embeddings": False},
    "train.global_batch": BATCH,
    "train.lr_scheduler_type": "cosine",
    "train.warmup_ratio": 0.2,
    "train.optim": "adamw_torch",
    # AdamW makes a full step of a gradient that is nearly zero, so of its rounding: 100 times the differences at 1e-8.
    "train.adam_epsilon": 1e-5,
    "train.weight_decay": 0.01,
    "train.max_grad_norm": 0.5,
    "train.precision": "float32",
    "train.communication_hook": "none",
}
RATES: dict[FinetuningType, float] = {"full": 3e-3, "lora": 1e-2, "qlora": 1e-2}
PLAN_KEYS = (
    "data_parallel_degree",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "ddp_backend",
)


def tiny_subjects(root: Path, families: Sequence[Family], method: FinetuningType) -> list[Subject]:
    """A workspace below `root` for each family."""
    return [_subject(root / family, family, method) for family in families]


def _subject(root: Path, family: Family, method: FinetuningType) -> Subject:
    paths = Paths(root)
    shape = SHAPE | (WIDER if method == "qlora" else {})
    _write_model(root / "model", family, shape)
    params = _params(root / "model", method)
    ensure_base(params.model, paths)
    _write_rows(paths, params.seed)
    tuning = METHOD_NAMES[method] + ("" if method == "full" else " rank 4 on all linear layers")
    built = f"4 layers, width {shape['hidden_size']}{BESIDE.get(family, '')}"
    what = f"built-in tiny {family} ({built}), {tuning}, {ROWS} rows, global batch {BATCH}"
    return Subject(family, what, params, paths)


def _write_model(folder: Path, family: Family, shape: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import tasks.trainer.llama_alibi  # noqa: F401 (transformers then knows it)

    config = AutoConfig.for_model(family, **shape, tie_word_embeddings=family in TIED)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(RECIPE["seed"])
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, weight in model.named_parameters():
            if name.endswith("bias"):  # biases begin at zero, where one left out would not show
                torch.nn.init.normal_(weight, std=SHAPE["initializer_range"])
    model.save_pretrained(folder)


def _params(model: Path, method: FinetuningType) -> Params:
    """The shipped params.yaml, with everything that a proof depends on said here.

    Raises:
        UserError: elastane was installed without it.
    """
    shipped = Path(tasks.__file__).parents[1] / "params.yaml"
    if not shipped.is_file():
        raise UserError(
            f"{shipped} is missing, and the built-in recipe begins from it; install with `make setup`"
        )
    raw: dict[str, Any] = YAML(typ="safe", pure=True).load(shipped.read_text(encoding="utf-8"))
    changes = {
        **RECIPE,
        "model.name_or_path": str(model),
        "train.finetuning_type": method,
        "train.learning_rate": RATES[method],
        **{f"select_strategy.{key}": "auto" for key in PLAN_KEYS},
    }
    for key, value in changes.items():
        *sections, last = key.split(".")
        place = raw
        for section in sections:
            place = place[section]
        place[last] = value
    return parse_params(raw, shipped.name)


def _write_rows(paths: Paths, seed: int) -> None:
    draw = random.Random(seed)
    rows = []
    for number in range(ROWS):
        length = draw.randint(SHORTEST, LONGEST)
        ids = [draw.randrange(3, SHAPE["vocab_size"]) for _ in range(length)]
        learnt = draw.randint(1, length - 1)
        labels = [IGNORED] * (length - learnt) + ids[length - learnt :]
        row = Row((("user", f"question {number}"), ("assistant", "answer")), str(number), f"row {number}")
        rows.append(Keyed(row, Encoded(ids, labels, False), number, False))
    paths.prepared.mkdir(parents=True)
    paths.preparing.mkdir()
    runs = RunWriter(paths.preparing, 1)
    runs.add(rows)
    runs.flush()
    merge = Merge((Run(paths.preparing / "0.arrow", ROWS, 0, 0, ROWS),), (1.0,), 1)
    all_train = [np.full(ROWS, TRAIN, dtype=np.uint8)]
    found = write_splits(merge, all_train, paths.prepared, LeftOut(paths.preparing / "left-out"))
    shutil.rmtree(paths.preparing)
    DataManifest(
        source="tiny",
        source_fingerprint="tiny",
        format="tokens",
        content_hash=content_hash(paths.prepared, {"train": ROWS, "validation": 0}),
        max_length=LONGEST,
        rows_in=ROWS,
        train=found.splits["train"].counts,
        validation=found.splits["validation"].counts,
        truncated=0,
        length_histogram=histogram(found.splits["train"]),
        rejected={},
    ).write(paths.manifest)
