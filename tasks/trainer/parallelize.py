"""Model + recipe + plan -> the module that trains. The one place where parallelism happens, in order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from tasks.contracts import Plan, Precision
from tasks.errors import UserError
from tasks.params import TrainParams
from tasks.trainer.loading import DTYPES
from tasks.trainer.loss import TokenLossSum
from tasks.trainer.mesh import build_mesh, data_mesh


@dataclass(frozen=True)
class Parallelized:
    """`module` computes the loss; `model` is the unwrapped model that owns the parameter names."""

    module: torch.nn.Module
    model: PeftModel | PreTrainedModel


def parallelize(
    base: PreTrainedModel, train: TrainParams, plan: Plan, precision: Precision, seed: int
) -> Parallelized:
    """Adapters -> activation checkpointing -> device -> loss -> FSDP2 or DDP. Collective over the plan's ranks."""
    mesh = build_mesh(plan)
    model = attach_adapters(base, train, seed).train()
    checkpoint_activations(base, plan)
    if plan.sharding == "none":
        model.to(local_device(plan))
    module: torch.nn.Module = TokenLossSum(model, base)
    if mesh is not None and plan.sharding == "fsdp2":
        masters = train.finetuning_type == "full" and precision != "float32"
        shard(module, base, data_mesh(mesh, plan), DTYPES[precision] if masters else None)
    elif mesh is not None:
        module = replicate(module, plan, mesh)
    return Parallelized(module, model)


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


def shard(
    module: torch.nn.Module, base: PreTrainedModel, mesh: DeviceMesh, early: torch.dtype | None
) -> None:
    """FSDP2 in place: a group a decoder layer, one each for the tables, the rest in the root's.

    Weights come from the CPU a group at a time, so that no device holds the whole model. Tied tables must share a
    group, and it is the root's, since both the first and the last thing of a forward pass need it.

    Args:
        early: what autocast would cast the matrices of linear layers to. They are cast before they are gathered
            instead, with equal rounding: half the traffic, and no casts of the whole model kept for the backward
            pass. Everything else (norms, embeddings) is gathered as it is. None leaves all casting to autocast.
    """
    of_matrices = MixedPrecisionPolicy(
        param_dtype=early, reduce_dtype=torch.float32 if early else None, cast_forward_inputs=False
    )
    for layer in decoder_layers(base):
        if early and (others := _with_own_weights_but_linear(layer)):
            fully_shard(others, mesh=mesh, reshard_after_forward=False)
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, mp_policy=of_matrices)
    first, last = base.get_input_embeddings(), base.get_output_embeddings()
    if first.weight is not last.weight:
        fully_shard(first, mesh=mesh, reshard_after_forward=True)
        fully_shard(last, mesh=mesh, reshard_after_forward=True, mp_policy=of_matrices)
    fully_shard(module, mesh=mesh)


def _with_own_weights_but_linear(layer: torch.nn.Module) -> list[torch.nn.Module]:
    return [
        module
        for module in layer.modules()
        if not isinstance(module, torch.nn.Linear)
        and next(module.parameters(recurse=False), None) is not None
    ]


def decoder_layers(base: PreTrainedModel) -> list[torch.nn.Module]:
    """The blocks that transformers says must not be split."""
    whole = set(base._no_split_modules or ())
    return [module for module in base.modules() if type(module).__name__ in whole]


def replicate(module: torch.nn.Module, plan: Plan, mesh: DeviceMesh) -> torch.nn.Module:
    """DDP over trainable parameters; frozen ones are equal everywhere and need no bucket."""
    devices = [torch.cuda.current_device()] if plan.device == "cuda" else None
    return DistributedDataParallel(
        module,
        device_ids=devices,
        process_group=mesh.get_group("dp_replicate"),
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
    )
