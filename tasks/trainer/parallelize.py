"""Model + recipe + plan -> the module that trains. The one place where parallelism happens, in order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from tasks.contracts import Plan
from tasks.errors import UserError
from tasks.params import TrainParams
from tasks.trainer.loss import TokenLossSum


@dataclass(frozen=True)
class Parallelized:
    """`module` computes the loss; `model` is the unwrapped model that owns the parameter names."""

    module: torch.nn.Module
    model: PeftModel | PreTrainedModel


def parallelize(base: PreTrainedModel, train: TrainParams, plan: Plan, seed: int) -> Parallelized:
    """Adapters -> activation checkpointing -> device -> loss -> DDP."""
    model = attach_adapters(base, train, seed)
    checkpoint_activations(base, plan)
    model.to(local_device(plan)).train()
    module = TokenLossSum(model, base)
    return Parallelized(replicate(module, plan), model)


def local_device(plan: Plan) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if plan.device == "cuda" else torch.device("cpu")


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
        model = get_peft_model(base, config, autocast_adapter_dtype=True)
    except ValueError as error:
        raise UserError(
            f"train.lora.targets={train.lora.targets} does not fit the model ({str(error).split('.')[0]}); "
            "use all-linear or module names of this model"
        ) from None
    return model


def checkpoint_activations(base: PreTrainedModel, plan: Plan) -> None:
    if plan.activation_checkpointing == "full":
        # Inputs must carry gradients although the embedding below them is frozen.
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def replicate(module: torch.nn.Module, plan: Plan) -> torch.nn.Module:
    """DDP over trainable parameters; frozen ones are equal everywhere and need no bucket."""
    if plan.dp_replicate == 1:
        return module
    devices = [torch.cuda.current_device()] if plan.device == "cuda" else None
    return DistributedDataParallel(
        module, device_ids=devices, gradient_as_bucket_view=True, broadcast_buffers=False
    )
