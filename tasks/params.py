"""params.yaml -> Params. The only place that reads it; an unknown or missing key is an error."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from tasks.errors import UserError
from tasks.optimizers import Optim, refuse_unused

Auto = Literal["auto"]
Switch = Literal["auto", True, False]
CommunicationHook = Literal["none", "fp16", "bf16", "powersgd"]
Degree = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]

SECTIONS = ("prepare_data", "probe_hardware", "select_strategy", "train", "evaluate", "register")

# Keys that people bring from peers and from the seed documents -> where they live here.
MIGRATIONS = {
    "model_name_or_path": "model.name_or_path",
    "dataset": "prepare_data.source",
    "dataset_path": "prepare_data.source",
    "cutoff_len": "prepare_data.max_length",
    "max_seq_length": "prepare_data.max_length",
    "val_size": "prepare_data.validation_fraction",
    "per_device_train_batch_size": "select_strategy.per_device_train_batch_size",
    "gradient_accumulation_steps": "select_strategy.gradient_accumulation_steps",
    "data_parallel_degree": "select_strategy.data_parallel_degree",
    "tensor_parallel_degree": "select_strategy.tensor_parallel_degree",
    "pipeline_parallel_degree": "select_strategy.pipeline_parallel_degree",
    "tensor_model_parallel_size": "select_strategy.tensor_parallel_degree",
    "pipeline_model_parallel_size": "select_strategy.pipeline_parallel_degree",
    "pipeline_schedule": "select_strategy.pipeline_schedule",
    "pipeline_parallel_schedule": "select_strategy.pipeline_schedule",
    "sequence_parallel": "select_strategy.sequence_parallel",
    "compile": "select_strategy.compile",
    "torch_compile": "select_strategy.compile",
    "communication_hook": "train.communication_hook",
    "ddp_comm_hook": "train.communication_hook",
    "comm_hook": "train.communication_hook",
    "ddp_backend": "select_strategy.ddp_backend",
    "fsdp": "select_strategy.sharding",
    "zero_stage": "select_strategy.sharding (zero0 to zero3)",
    "offload_optimizer": "select_strategy.offload",
    "offload_param": "select_strategy.offload_parameters",
    "gradient_checkpointing": "select_strategy.activation_checkpointing",
    "learning_rate": "train.learning_rate",
    "num_train_epochs": "train.num_train_epochs",
    "finetuning_type": "train.finetuning_type",
    "optim": "train.optim",
    "warmup_ratio": "train.warmup_ratio",
    "lr_scheduler_type": "train.lr_scheduler_type",
    "weight_decay": "train.weight_decay",
    "max_grad_norm": "train.max_grad_norm",
    "train_batch_size": "train.global_batch",
    "lora_rank": "train.lora.rank",
    "lora_r": "train.lora.rank",
    "lora_alpha": "train.lora.alpha",
    "lora_target": "train.lora.targets",
    "target_modules": "train.lora.targets",
    "modules_to_save": "train.lora.train_embeddings (true: embedding table and head, and nothing else)",
    "additional_target": "train.lora.train_embeddings (true: embedding table and head, and nothing else)",
    "lora_dropout": "nothing: dropout is 0 so that every plan draws the same masks",
    "fp16": "train.precision (float16)",
    "bf16": "train.precision (bfloat16)",
    "save_steps": "train.checkpoint_every_seconds",
    "output_dir": "nothing: what was trained is in checkpoints/final",
    "seed": "seed (at the top)",
}


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelParams(Section):
    name_or_path: Annotated[str, Field(min_length=1)]
    revision: str | None
    trust_remote_code: bool


Format = Literal["auto", "alpaca", "chat", "completion", "text"]


class SourceParams(Section):
    """One of several sources. `weight`: how often an epoch sees its rows; below 1 a share of them, by content hash."""

    source: Annotated[str, Field(min_length=1)]
    format: Format = "auto"
    columns: dict[str, str] = Field(default_factory=dict)
    weight: Positive = 1.0


class PrepareDataParams(Section):
    source: Annotated[str, Field(min_length=1)] | Annotated[list[SourceParams], Field(min_length=1)]
    format: Format
    columns: dict[str, str]
    template: Annotated[str, Field(min_length=1)]
    learn: Literal["answers", "last", "all"]
    max_rows: Degree | None
    max_length: Annotated[int, Field(ge=8)]
    validation_fraction: Annotated[float, Field(gt=0, lt=1)]
    near_duplicate_threshold: Annotated[float, Field(gt=0, le=1)]
    on_bad_row: Literal["stop", "reject", "repair"]
    max_rejected: Annotated[float, Field(ge=0, le=1)]
    packing: Literal["none", "best_fit"]


class ProbeHardwareParams(Section):
    device: Literal["auto", "cuda", "cpu"]


class SelectStrategyParams(Section):
    engine: Literal["auto", "torch", "deepspeed"]
    data_parallel_degree: Degree | Auto
    tensor_parallel_degree: Degree | Auto
    pipeline_parallel_degree: Degree | Auto
    replication: Literal["auto", "ddp", "data_parallel"]
    pipeline_schedule: Literal["auto", "gpipe", "1f1b", "interleaved1f1b", "zerobubble"]
    sequence_parallel: Switch
    per_device_train_batch_size: Degree | Auto
    gradient_accumulation_steps: Degree | Auto
    sharding: Literal["auto", "none", "fsdp2", "zero0", "zero1", "zero2", "zero3"]
    offload: Literal["auto", "none", "cpu", "nvme"]
    offload_parameters: Literal["auto", "none", "cpu", "nvme"]
    nvme_path: Annotated[str, Field(min_length=1)] | None
    deepspeed_config: Annotated[str, Field(min_length=1)] | None
    activation_checkpointing: Literal["auto", "none", "selective", "full"]
    compile: Switch
    ddp_backend: Literal["auto", "nccl", "gloo"]
    memory_margin: Share
    trials: Annotated[int, Field(ge=0, le=16)]


class LoraParams(Section):
    rank: Degree
    alpha: Positive
    targets: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)]
    train_embeddings: bool


class TrainParams(Section):
    finetuning_type: Literal["lora", "qlora", "full"]
    lora: LoraParams
    global_batch: Degree | Auto
    num_train_epochs: Positive
    sample_order: Literal["shuffled", "by_length"]
    token_budget: Degree | Auto | None
    token_budget_on_cpu: Degree
    learning_rate: Positive
    lr_scheduler_type: Literal["constant", "linear", "cosine"]
    warmup_ratio: Share
    optim: Optim
    weight_decay: Annotated[float, Field(ge=0)]
    adam_beta1: Share
    adam_beta2: Share
    adam_epsilon: Positive
    max_grad_norm: Positive
    precision: Literal["auto", "float32", "bfloat16", "float16"]
    communication_hook: CommunicationHook
    checkpoint_every_seconds: Annotated[float, Field(ge=0)]
    keep_checkpoints: Degree


class EvaluateParams(Section):
    max_rows: Degree | None
    batch_size: Degree
    samples: Annotated[int, Field(ge=0)]
    max_new_tokens: Degree


class RegisterParams(Section):
    model_name: Annotated[str, Field(min_length=1)]
    experiment: Annotated[str, Field(min_length=1)]
    tracking_uri: str | None
    min_loss_improvement: float


class Params(Section):
    """params.yaml, validated. `global_batch` is always a number here, whichever way it was said."""

    seed: Annotated[int, Field(ge=0, lt=2**63)]
    model: ModelParams
    prepare_data: PrepareDataParams
    probe_hardware: ProbeHardwareParams
    select_strategy: SelectStrategyParams
    train: TrainParams
    evaluate: EvaluateParams
    register_: Annotated[RegisterParams, Field(alias="register")]

    @property
    def global_batch(self) -> int:
        """Samples an optimizer step."""
        return global_batch(self.train, self.select_strategy)

    @model_validator(mode="after")
    def _no_key_is_idle(self) -> Params:
        _ = self.global_batch  # said once
        refuse_unused(self.train.optim, vars(self.train))
        return self


def global_batch(train: TrainParams, strategy: SelectStrategyParams) -> int:
    """The global batch: given, or the product of the three explicit keys.

    Raises:
        UserError: it is `auto` and a factor is too, or the given one is no multiple of the factors.
    """
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "data_parallel_degree")
    factors = {name: getattr(strategy, name) for name in names}
    explicit = {name: value for name, value in factors.items() if value != "auto"}
    product = 1
    for value in explicit.values():
        product *= value
    said = " x ".join(f"{name}={value}" for name, value in explicit.items())
    if train.global_batch == "auto":
        if len(explicit) < len(names):
            missing = ", ".join(name for name in names if name not in explicit)
            raise UserError(
                f"train.global_batch=auto needs all three of {', '.join(names)}, but {missing} is auto, so what is "
                "learned would depend on the machine; set train.global_batch to a number"
            )
        return product
    wrong = next((name for name, value in explicit.items() if train.global_batch % value), None)
    if wrong is not None:
        legal = [str(n) for n in range(1, train.global_batch + 1) if train.global_batch % n == 0]
        raise UserError(
            f"select_strategy.{wrong}={explicit[wrong]} does not divide train.global_batch={train.global_batch}; "
            f"use {', '.join(legal)}, or change train.global_batch"
        )
    if train.global_batch % product or (len(explicit) == len(names) and product != train.global_batch):
        raise UserError(
            f"{said} make {product}, but train.global_batch={train.global_batch}; "
            "leave one of them auto or change train.global_batch"
        )
    return train.global_batch


def read_params(path: Path) -> Params:
    """Reads and validates params.yaml by YAML 1.2, as DVC does (1e-5 is a number).

    Raises:
        UserError: not YAML, an unknown or missing key, or a value outside its rule.
    """
    try:
        raw = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing; copy params.yaml from the repository") from None
    except YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}; mend that line") from None
    if not isinstance(raw, dict):
        raise UserError(
            f"{path} holds {type(raw).__name__}, not sections; copy params.yaml from the repository"
        )
    return parse_params(raw, path.name)


def parse_params(raw: dict[str, Any], name: str) -> Params:
    """Validates loaded YAML; the error names the first wrong key, its value, the rule and the way out."""
    try:
        return Params.model_validate(raw)
    except ValidationError as error:
        problems = [_explain(problem, name) for problem in error.errors()]
        more = f" ({len(problems) - 1} more after this one)" if len(problems) > 1 else ""
        raise UserError(problems[0] + more) from None


def _explain(problem: Any, name: str) -> str:
    path = [str(part) for part in problem["loc"]]
    key, value = ".".join(path), problem.get("input")
    if isinstance(problem.get("ctx", {}).get("error"), UserError):
        return str(problem["ctx"]["error"])
    if problem["type"] == "extra_forbidden":
        return f"{name}: unknown key {key}={value!r}; {_nearest(path)}"
    if problem["type"] == "missing":
        return f"{name}: {key} is missing, and every key must be said; copy its line from the shipped params.yaml"
    for branch in ("int", "float", "str"):
        key = key.removesuffix(f".constrained-{branch}").removesuffix(f".{branch}")
    key = key.split(".literal[")[0].split(".list[")[0]
    return f"{name}: {key}={value!r} is not allowed: {problem['msg'][0].lower()}{problem['msg'][1:]}; change {key}"


def _nearest(path: list[str]) -> str:
    if (wrong := path[-1]) in MIGRATIONS:
        return f"here it is called {MIGRATIONS[wrong]}"
    model: Any = Params
    for part in path[:-1]:
        field = model.model_fields.get("register_" if part == "register" else part)
        model = field.annotation if field else Params
    known = [field.alias or key for key, field in model.model_fields.items()]
    close = difflib.get_close_matches(wrong, known, n=1, cutoff=0.5)
    knows = f"{'.'.join(path[:-1]) or 'the top level'} knows {', '.join(known)}"
    return f"did you mean {close[0]}?" if close else knows
