"""LoRA adapters on a base that has no numbers yet, and the tables that may be trained beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from transformers import PreTrainedModel

from tasks.contracts import Precision
from tasks.errors import UserError
from tasks.params import TrainParams


def attach_adapters(base: PreTrainedModel, train: TrainParams, seed: int) -> PeftModel | PreTrainedModel:
    """LoRA adapters in float32, drawn on the CPU from the seed so that every device starts alike.

    Raises:
        UserError: a named target module is not in the model.
    """
    if train.finetuning_type == "full":
        return base
    torch.manual_seed(seed)
    config = LoraConfig(
        r=train.lora.rank,
        lora_alpha=train.lora.alpha,
        lora_dropout=0.0,
        target_modules=train.lora.targets,
        task_type="CAUSAL_LM",
    )
    try:
        with as_if_on_cpu(base):
            model = get_peft_model(base, config, autocast_adapter_dtype=True)
    except ValueError as error:
        raise UserError(
            f"train.lora.targets={train.lora.targets} does not fit the model ({str(error).split('.')[0]}); "
            "use all-linear or module names of this model"
        ) from None
    if train.lora.train_embeddings:
        train_tables(base, train)
    return model


@contextmanager
def as_if_on_cpu(model: torch.nn.Module) -> Iterator[None]:
    """Parameters on the meta device stand on the CPU meanwhile, without taking room there: PEFT leaves what it draws
    on its layer's device, so on the meta device it would draw for nothing.
    """
    slots = [
        (owner, key, weight)
        for owner in model.modules()
        for key, weight in owner._parameters.items()
        if weight is not None and weight.is_meta
    ]
    doubles = {
        weight: torch.nn.Parameter(
            torch.empty((), dtype=weight.dtype).expand(weight.shape), requires_grad=weight.requires_grad
        )
        for _, _, weight in slots
    }
    for owner, key, weight in slots:
        owner._parameters[key] = doubles[weight]
    try:
        yield
    finally:
        for owner, key, weight in slots:
            owner._parameters[key] = weight.requires_grad_(doubles[weight].requires_grad)


def train_tables(base: PreTrainedModel, train: TrainParams) -> None:
    """Embedding table and head are trained themselves, in float32 at least, not copies of them as PEFT would make.

    Raises:
        UserError: one of them has an adapter.
    """
    for table in (base.get_input_embeddings(), base.get_output_embeddings()):
        if isinstance(table, LoraLayer):
            raise UserError(
                f"train.lora.train_embeddings=true trains embedding table and head whole, and "
                f"train.lora.targets={train.lora.targets} puts an adapter on one of them; leave it out of the targets"
            )
        for weight in table.parameters():
            if weight.dtype in (torch.bfloat16, torch.float16):
                weight.data = weight.data.float()
            weight.requires_grad_(True)


def stay_in_half(model: torch.nn.Module, precision: Precision) -> None:
    """PEFT would widen an adapter's half-precision inputs, and autocast narrow them again: equal, and slow."""
    if precision in ("bfloat16", "float16"):
        for module in model.modules():
            if isinstance(module, LoraLayer):
                module.cast_input_dtype_enabled = False
