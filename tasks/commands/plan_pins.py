"""Pins of `elastane plan`: words to values, and how each was said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from tasks.errors import UserError
from tasks.planner.problem import DEGREES, Pins

SHORT = {
    "dp": "data_parallel",
    "micro": "micro_batch",
    "checkpointing": "activation_checkpointing",
    "sp": "sequence_parallel",
    "compile": "compiled",
    # As params.yaml calls them.
    **{long: name for name, long in DEGREES.items()},
    "pipeline_schedule": "schedule",
    "ddp_backend": "backend",
}
OPTIONS = {
    "data_parallel": "--dp",
    "tp": "--tp",
    "pp": "--pp",
    "micro_batch": "--micro-batch",
    "schedule": "--schedule",
    "sharding": "--sharding",
    "offload": "--offload",
    "offload_parameters": "--offload-parameters",
}
SWITCH = {"true": True, "false": False}
WORDS = {
    "activation_checkpointing": ("none", "selective", "full"),
    "engine": ("torch", "deepspeed"),
    "backend": ("nccl", "gloo"),
    "sharding": ("none", "fsdp2", "zero0", "zero1", "zero2", "zero3"),
    "offload": ("none", "cpu", "nvme"),
    "offload_parameters": ("none", "cpu", "nvme"),
    "schedule": ("none", "gpipe", "1f1b", "interleaved1f1b", "zerobubble"),
    "replication": ("ddp", "data_parallel"),
    "sequence_parallel": tuple(SWITCH),
    "compiled": tuple(SWITCH),
}


def parse_pins(words: Sequence[str]) -> Pins:
    """`key=value` words as pins.

    Raises:
        UserError: an unknown key, or a value that is no number where one is needed.
    """
    known = {part.name: part for part in fields(Pins)}
    found: dict[str, Any] = {}
    for word in words:
        key, _, value = word.partition("=")
        key = SHORT.get(key, key)
        if key not in known or not value:
            raise UserError(
                f"--pin {word} is not understood; write key=value, with a key of {', '.join(known)}"
            )
        if "int" in str(known[key].type):
            if not value.isdigit() or int(value) < 1:
                raise UserError(f"--pin {word}: {value} must be a whole number of at least 1; mend it")
            found[key] = int(value)
        elif value not in WORDS[key]:
            raise UserError(f"--pin {word}: {key} knows {', '.join(WORDS[key])}; use one of them")
        else:
            found[key] = SWITCH.get(value, value)
    return Pins(**found)


def merged(said: Pins, asked: Pins) -> Pins:
    """Pins of the command over those of params.yaml."""
    return replace(said, **_given(asked))


def options_of(asked: Pins) -> dict[str, str]:
    """How the pins of the command are written there, as formats."""
    return {
        name: f"{OPTIONS[name]} {{}}" if name in OPTIONS else f"--pin {name}={{}}" for name in _given(asked)
    }


def _given(asked: Pins) -> Mapping[str, Any]:
    return {part.name: value for part in fields(Pins) if (value := getattr(asked, part.name)) is not None}
