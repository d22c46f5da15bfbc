"""select_strategy.deepspeed_config: a user's own ds_config.json, read and held against params.yaml."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks.contracts import Plan, PlanReport, Precision
from tasks.errors import UserError
from tasks.params import Params
from tasks.paths import Paths
from tasks.planner.deepspeed_config import DeepSpeedWishes, RecipeFacts, deepspeed_wishes, names_of
from tasks.planner.problem import Pins
from tasks.stage import say


def read_wishes(params: Params, paths: Paths, precision: Precision) -> DeepSpeedWishes | None:
    """What the file pins and passes on; None if none is named. Conflicts and passed keys are said.

    Raises:
        UserError: it cannot be read, contradicts itself or a pin of params.yaml.
    """
    name = params.select_strategy.deepspeed_config
    if name is None:
        return None
    wishes = deepspeed_wishes(_read(paths.root / name, name), _facts(params, precision))
    for conflict in wishes.conflicts:
        say(f"select_strategy: {conflict}")
    passed = ", ".join(names_of(wishes.passed))
    say(f"select_strategy: handed to DeepSpeed as {name} has them: {passed or 'no further keys'}")
    if wishes.unused:
        unused = ", ".join(wishes.unused)
        say(f"select_strategy: not used of {name}, since params.yaml or the engine settles it: {unused}")
    return wishes


def _read(path: Path, name: str) -> Mapping[str, Any]:
    said = f"select_strategy.deepspeed_config={name}"
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError:
        raise UserError(f"{said} cannot be read; give the path of a ds_config.json, or null") from None
    except ValueError as error:
        raise UserError(f"{said} is not JSON ({error}); mend it, or give null") from None
    if not isinstance(found, dict):
        raise UserError(f"{said} holds {type(found).__name__}, not DeepSpeed's keys; mend it, or give null")
    return found


def _facts(params: Params, precision: Precision) -> RecipeFacts:
    train = params.train
    return RecipeFacts(
        global_batch=params.global_batch,
        optim=train.optim,
        learning_rate=train.learning_rate,
        betas=(train.adam_beta1, train.adam_beta2),
        epsilon=train.adam_epsilon,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        lr_scheduler_type=train.lr_scheduler_type,
        precision=precision,
    )


def with_wishes(pins: Pins, wishes: DeepSpeedWishes) -> Pins:
    """The pins of params.yaml and of the file.

    Raises:
        UserError: both pin something, and not the same.
    """
    for field, theirs in wishes.pins.items():
        ours = getattr(pins, field)
        if ours not in (None, theirs):
            raise UserError(
                f"select_strategy pins {field}={ours}, and select_strategy.deepspeed_config says {theirs}; set the key "
                "to auto, or change the file"
            )
    return replace(pins, **wishes.pins)


def with_passed_on(plan: Plan, wishes: DeepSpeedWishes | None) -> Plan:
    """The plan with what the file hands to DeepSpeed."""
    if wishes is None or not wishes.passed:
        return plan
    return plan.model_copy(update={"deepspeed_config": json.dumps(wishes.passed, sort_keys=True)})


def file_hash(params: Params, paths: Paths) -> str | None:
    """Of the named file; None if none is named or it is not there."""
    name = params.select_strategy.deepspeed_config
    path = paths.root / name if name else None
    return hashlib.sha256(path.read_bytes()).hexdigest() if path is not None and path.is_file() else None


def file_changed(params: Params, paths: Paths) -> bool:
    """Whether the plan was made with another ds_config.json than the one that lies there now: DVC does not watch it."""
    if not paths.plan.is_file():
        return False
    return PlanReport.read(paths.plan).deepspeed_config != file_hash(params, paths)
