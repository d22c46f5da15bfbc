"""All families there are, found by their modules."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path

from tasks.errors import UserError
from tasks.trainer.legacy import families
from tasks.trainer.legacy.table import Family, Settings, read_object

LEGACY: dict[str, Family] = {
    family.model_type: family
    for module in pkgutil.iter_modules(families.__path__)
    for family in (importlib.import_module(f"{families.__name__}.{module.name}").FAMILY,)
}


def converts(folder: Path, trust_remote_code: bool) -> Family | None:
    """The family that a model's folder is converted from; None for every other model.

    None, too, where the model's own code is trusted: that code runs it as it is.
    """
    config = folder / "config.json"
    if trust_remote_code or not config.is_file():
        return None
    return LEGACY.get(str(read_object(config).get("model_type")))


def native_config(config: Mapping[str, object], name: str) -> Mapping[str, object]:
    """The config that a model is trained with; the same one where nothing is converted, or it cannot be."""
    family = LEGACY.get(str(config.get("model_type")))
    if family is None:
        return config
    try:
        return family.native(Settings(config, name)).config
    except UserError:
        # Its own code may still run it (model.trust_remote_code), and the planner knows that layout by its own name.
        return config
