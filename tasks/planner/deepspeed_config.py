"""A user's own ds_config.json: what it pins of the plan, where it contradicts the recipe, and what passes through.

The recipe (params.yaml) says what is learned, so it wins wherever the file says that too; the file says how ZeRO and
offload are done. "auto", as Hugging Face's integration writes it, says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isclose
from typing import Any

from tasks.errors import UserError
from tasks.optimizers import OPTIMIZERS, Optim

AUTO = "auto"
# Of zero_optimization: pinned, or written by the engine itself.
OWN_ZERO_KEYS = {"stage", "offload_optimizer", "offload_param"}
# What the recipe or the engine says; the file's word on it is compared or ignored, never passed on.
OWN_KEYS = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "optimizer",
    "scheduler",
    "fp16",
    "bf16",
    "bfloat16",
    "torch_autocast",
    "amp",
    "gradient_clipping",
    "zero_optimization",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
}
COMPARED = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer.type",
    "optimizer.params",
    "scheduler.type",
    "fp16.enabled",
    "bf16.enabled",
    "bfloat16.enabled",
}
COMPARED_PARAMS = {"lr", "eps", "weight_decay", "betas", "adam_w_mode"}
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
OFFLOADS = {"none", "cpu", "nvme"}


@dataclass(frozen=True)
class RecipeFacts:
    """What of the recipe a ds_config.json may contradict, by params.yaml's names."""

    global_batch: int
    optim: Optim
    learning_rate: float
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float
    max_grad_norm: float
    lr_scheduler_type: str
    precision: str


@dataclass(frozen=True)
class DeepSpeedWishes:
    """What a ds_config.json comes to. `pins` are by the names of `Plan`; `passed` is handed to DeepSpeed as it is;
    `unused` names what the recipe or the engine settles by itself.
    """

    pins: dict[str, Any]
    conflicts: tuple[str, ...]
    passed: dict[str, Any]
    unused: tuple[str, ...] = ()


def deepspeed_wishes(config: Mapping[str, Any], recipe: RecipeFacts) -> DeepSpeedWishes:
    """Reads the file's keys against the recipe.

    Raises:
        UserError: the file contradicts itself or has a value that DeepSpeed would refuse.
    """
    zero = _section(config, "zero_optimization")
    stage = _said(zero.get("stage"), 0)
    if stage not in (0, 1, 2, 3):
        raise UserError(
            f"zero_optimization.stage={stage!r} of the ds_config is no stage of ZeRO; use 0, 1, 2 or 3"
        )
    pins: dict[str, Any] = {"engine": "deepspeed", "sharding": f"zero{stage}"}
    for field, key in (("offload", "offload_optimizer"), ("offload_parameters", "offload_param")):
        where = _said(_section(zero, key).get("device"), "none")
        if where not in OFFLOADS:
            raise UserError(
                f"zero_optimization.{key}.device={where!r} of the ds_config is no place; use cpu, nvme or none"
            )
        pins[field] = where
    micro = _whole(config, "train_micro_batch_size_per_gpu")
    accumulation = _whole(config, "gradient_accumulation_steps")
    pins |= {"micro_batch": micro} if micro else {}
    pins |= {"accumulation": accumulation} if accumulation else {}
    conflicts = [*_batch(config, recipe, micro, accumulation), *_learned(config, recipe)]
    passed = {key: value for key, value in config.items() if key not in OWN_KEYS and value != AUTO}
    tuning = {key: value for key, value in zero.items() if key not in OWN_ZERO_KEYS and value != AUTO}
    for key in ("offload_optimizer", "offload_param"):
        more = {
            name: value for name, value in _section(zero, key).items() if name != "device" and value != AUTO
        }
        tuning |= {key: more} if more else {}
    passed |= {"zero_optimization": tuning} if tuning else {}
    return DeepSpeedWishes(pins, tuple(conflicts), passed, tuple(_unused(config)))


def _unused(config: Mapping[str, Any]) -> Iterator[str]:
    """Dotted names of keys that are neither compared with the recipe nor passed on."""
    for name in names_of(
        {key: config[key] for key in sorted(OWN_KEYS & config.keys() - {"zero_optimization"})}
    ):
        if name not in COMPARED:
            yield name
    params = _section(_section(config, "optimizer"), "params")
    yield from (f"optimizer.params.{key}" for key in params if key not in COMPARED_PARAMS)


def names_of(passed: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """The dotted names of the keys that are passed on."""
    for key, value in passed.items():
        if isinstance(value, Mapping) and (before == "" or key.startswith("offload_")):
            yield from names_of(value, f"{before}{key}.")
        else:
            yield f"{before}{key}"


def with_passed(config: Mapping[str, Any], passed: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's config with the passed keys put in; what the engine says itself stays."""
    merged = dict(config)
    for key, value in passed.items():
        here = merged.get(key)
        if isinstance(value, Mapping) and (isinstance(here, Mapping) or here is None):
            merged[key] = with_passed(here or {}, value)
        else:
            merged[key] = value
    return merged


def _said(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None or value == AUTO else value


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    if value is None or value == AUTO:
        return {}
    if not isinstance(value, Mapping):
        raise UserError(f"{key} of the ds_config is {value!r}, and DeepSpeed reads a section of keys there")
    return value


def _whole(config: Mapping[str, Any], key: str) -> int | None:
    value = _said(config.get(key), None)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(
            f"{key}={value!r} of the ds_config is no whole number of 1 or more; mend it, or take it out"
        )
    return value


def _wins(key: str, theirs: Any, name: str, ours: Any) -> str:
    return f"{key}={theirs} of the ds_config is not {name}={ours} of params.yaml; params.yaml wins"


def _batch(
    config: Mapping[str, Any], recipe: RecipeFacts, micro: int | None, accumulation: int | None
) -> Iterator[str]:
    """train_batch_size = micro-batch x accumulation x ranks, of which the file may leave one open."""
    total = _whole(config, "train_batch_size")
    factor = (micro or 1) * (accumulation or 1)
    if total is not None and total % factor:
        parts = " x ".join(
            f"{name}={value}"
            for name, value in (
                ("train_micro_batch_size_per_gpu", micro),
                ("gradient_accumulation_steps", accumulation),
            )
            if value
        )
        raise UserError(
            f"train_batch_size={total} of the ds_config is no multiple of its {parts}, so no number of GPUs makes it; "
            "mend one of them"
        )
    if recipe.global_batch % factor:
        raise UserError(
            f"the ds_config's micro-batch x accumulation make {factor}, which does not divide "
            f"train.global_batch={recipe.global_batch}; mend one of them, or set the file's to auto"
        )
    if total is not None and total != recipe.global_batch:
        yield _wins("train_batch_size", total, "train.global_batch", recipe.global_batch)


def _learned(config: Mapping[str, Any], recipe: RecipeFacts) -> Iterator[str]:
    """Optimizer, schedule, precision and clipping, each where the file says something else."""
    optimizer = _section(config, "optimizer")
    kind = _said(optimizer.get("type"), None)
    params = _section(optimizer, "params")
    if kind is not None and _optimizer_name(str(kind), params) not in OPTIMIZERS[recipe.optim].deepspeed:
        yield _wins("optimizer.type", kind, "train.optim", recipe.optim)
    for key, name, ours in (
        ("lr", "train.learning_rate", recipe.learning_rate),
        ("eps", "train.adam_epsilon", recipe.epsilon),
        ("weight_decay", "train.weight_decay", recipe.weight_decay),
    ):
        theirs = _number(params, f"optimizer.params.{key}", key)
        if theirs is not None and not isclose(theirs, ours):
            yield _wins(f"optimizer.params.{key}", theirs, name, ours)
    betas = _said(params.get("betas"), None)
    if betas is not None and list(betas) != list(recipe.betas):
        yield _wins("optimizer.params.betas", betas, "train.adam_beta1, adam_beta2", list(recipe.betas))
    schedule = _said(_section(config, "scheduler").get("type"), None)
    if schedule is not None and SCHEDULES.get(schedule) != recipe.lr_scheduler_type:
        yield _wins("scheduler.type", schedule, "train.lr_scheduler_type", recipe.lr_scheduler_type)
    clipping = _number(config, "gradient_clipping", "gradient_clipping")
    if clipping is not None and not isclose(clipping, recipe.max_grad_norm):
        yield _wins("gradient_clipping", clipping, "train.max_grad_norm", recipe.max_grad_norm)
    yield from _precision(config, recipe)


def _optimizer_name(kind: str, params: Mapping[str, Any]) -> str:
    """In lower case; DeepSpeed's Adam is AdamW unless it is told otherwise."""
    name = kind.lower()
    return "adamw" if name == "adam" and params.get("adam_w_mode", True) is True else name


def _precision(config: Mapping[str, Any], recipe: RecipeFacts) -> Iterator[str]:
    switches = {"fp16": "float16", "bf16": "bfloat16", "bfloat16": "bfloat16"}
    on = [key for key in switches if _section(config, key).get("enabled") is True]
    if len({switches[key] for key in on}) > 1:
        raise UserError("the ds_config enables fp16 and bf16 at once; leave one of them")
    for key in on:
        if switches[key] != recipe.precision:
            yield _wins(f"{key}.enabled", "true", "train.precision", recipe.precision)


def _number(config: Mapping[str, Any], name: str, key: str) -> float | None:
    value = _said(config.get(key), None)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{name}={value!r} of the ds_config is no number; mend it, or take it out")
    return float(value)
