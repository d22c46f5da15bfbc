"""RunKey: the name of what is learned. Two runs with the same key may continue each other."""

from __future__ import annotations

import hashlib
import json

from tasks.contracts import BaseModelRef, DataManifest
from tasks.params import Params

# Bumped whenever what a step computes changes (loss, order, optimizer), so that a mended loss retrains.
NUMERICS_VERSION = 1

# Keys of `train` that change when work is saved, not what is learned.
NOT_RECIPE = frozenset({"checkpoint_every_seconds", "keep_checkpoints", "lora", "global_batch"})


def recipe(params: Params) -> dict[str, object]:
    """Everything params.yaml says about what is learned, with the global batch as a number."""
    train = params.train.model_dump(mode="json")
    said: dict[str, object] = {key: value for key, value in train.items() if key not in NOT_RECIPE}
    said["seed"] = params.seed
    said["global_batch"] = params.global_batch
    if params.train.finetuning_type != "full":
        said["lora"] = train["lora"]
        if (
            not params.train.lora.train_embeddings
        ):  # a key of later versions: what was trained without it is the same
            del train["lora"]["train_embeddings"]
    return said


def run_key(params: Params, manifest: DataManifest, base: BaseModelRef) -> str:
    """16 hex digits over recipe, prepared data, base weights and NUMERICS_VERSION.

    What the recipe leaves to `auto` is hashed as written: it is resolved once per run and frozen in
    `runs/<RunKey>/resolved.json`, so the same recipe keeps its key on other hardware.
    """
    content = {
        "numerics": NUMERICS_VERSION,
        "recipe": recipe(params),
        "data": manifest.content_hash,
        "base": base.content_hash,
    }
    if manifest.packed is not None:
        content["packs"] = manifest.packed.content_hash
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
