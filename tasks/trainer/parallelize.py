"""Model + recipe + plan -> the module that trains. The one place where parallelism happens, in order."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from peft import PeftModel
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from tasks.contracts import Plan, Precision
from tasks.errors import UserError
from tasks.params import TrainParams
from tasks.stage import say
from tasks.trainer.adapters import attach_adapters, stay_in_half
from tasks.trainer.compiling import compile_layers, compiled_token_loss, why_not
from tasks.trainer.data_parallel import DataParallel
from tasks.trainer.filling import EmptyStage, fill
from tasks.trainer.integer_parameters import integer_parameters
from tasks.trainer.loading import DTYPES
from tasks.trainer.loss import TokenLossSum, token_loss
from tasks.trainer.mesh import build_mesh, data_mesh
from tasks.trainer.pieces import Piece, pieces_of
from tasks.trainer.pipeline import Pipeline, copies, keep_stage, stages_of
from tasks.trainer.quantize import quantize
from tasks.trainer.recompute import checkpoint_activations
from tasks.trainer.tensor_parallel import TensorParts, cut_over_ranks
from tasks.trainer.weights import LoadedWeights, MetaModel, take_out

META = torch.device("meta")


@dataclass(frozen=True)
class Parallelized:
    """What this rank trains.

    `modules` compute the loss, one a pipeline stage held here (one in all without a pipeline); `pipeline` runs them.
    `model` owns the parameter names, of its own stage only where there are several; `outline` is the whole model
    without its numbers. `pieces` are this rank's parts of the trainable parameters; `parameters` counts (trainable,
    all) of the whole model, tied ones once.
    """

    modules: tuple[torch.nn.Module, ...]
    model: PeftModel | PreTrainedModel
    outline: PeftModel | PreTrainedModel
    mesh: DeviceMesh | None
    pieces: tuple[Piece, ...]
    pipeline: Pipeline | None
    parameters: tuple[int, int]


def parallelize(
    base: MetaModel, train: TrainParams, plan: Plan, precision: Precision, seed: int
) -> Parallelized:
    """Adapters -> stages -> NF4 -> tensor parallelism -> recomputing -> compiling -> loss -> FSDP2, all without
    numbers; then this rank's numbers, and DDP.

    Collective over the plan's ranks.
    """
    mesh, place = build_mesh(plan), local_device(plan)
    model = attach_adapters(base.model, train, seed).train()
    stay_in_half(model, precision)
    adapters = LoadedWeights(take_out(model))
    parameters, outline = count_parameters(model), copy.deepcopy(model)
    tied = {} if plan.pp == 1 else tied_names(model, base.model)
    numbers = stages_of(plan, mesh.get_local_rank("pp")) if mesh is not None and plan.pp > 1 else (0,)
    stages: list[EmptyStage] = []
    for number, (part, inner) in zip(numbers, copies(model, base.model, len(numbers)), strict=True):
        if plan.pp > 1:  # else a family whose layers are not known may train, too
            keep_stage(inner, number, plan.pp * plan.virtual_stages)
        if train.finetuning_type == "qlora":
            quantize(inner, DTYPES[precision], META, META)
        parts = None
        if mesh is not None and plan.tp > 1:
            parts = cut_over_ranks(part, inner, mesh.get_group("tp"), plan.sequence_parallel)
        module = prepared(part, inner, plan, precision, parts, number)
        if mesh is not None and plan.sharding == "fsdp2":
            masters = train.finetuning_type == "full" and precision in ("bfloat16", "float16")
            with integer_parameters():
                shard(
                    module, inner, data_mesh(mesh, plan), DTYPES[precision] if masters else None, plan.pp > 1
                )
        stages.append(EmptyStage(module, part, parts))
    pieces = trained_pieces(stages, numbers, tied, train, plan)
    fill(stages, base.weights, adapters, place)
    modules = [stage.module for stage in stages]
    pipeline = None
    if plan.replication == "data_parallel":
        modules = [DataParallel(stages[0].module, plan.dp_replicate)]
    if mesh is not None and plan.pp > 1:
        pipeline = Pipeline(modules, plan, mesh.get_group("pp"), place)
    elif mesh is not None and plan.tp == 1 and plan.sharding == "none":
        modules = [replicate(modules[0], plan, mesh)]
    return Parallelized(tuple(modules), model, outline, mesh, pieces, pipeline, parameters)


def trained_pieces(
    stages: Sequence[EmptyStage],
    numbers: Sequence[int],
    tied: Mapping[str, str],
    train: TrainParams,
    plan: Plan,
) -> tuple[Piece, ...]:
    """This rank's pieces, stage by stage.

    Raises:
        UserError: a stage would have nothing to train.
    """
    pieces: list[Piece] = []
    for number, stage in zip(numbers, stages, strict=True):
        trained = list(pieces_of(stage.part, stage.parts, tied, first_stage=number == 0))
        if not trained:
            raise UserError(
                f"train.lora.targets={train.lora.targets} leave pipeline stage {number + 1} of {plan.pp} x "
                f"{plan.virtual_stages} without an adapter, so it has nothing to train; use all-linear, or "
                "select_strategy.pipeline_parallel_degree=1"
            )
        pieces += trained
    return tuple(pieces)


def local_device(plan: Plan) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if plan.device == "cuda" else torch.device("cpu")


def count_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """(trainable, all), tied ones once."""
    every = list(model.parameters())
    return sum(weight.numel() for weight in every if weight.requires_grad), sum(
        weight.numel() for weight in every
    )


def tied_names(model: torch.nn.Module, base: PreTrainedModel) -> dict[str, str]:
    """The head's name -> the embedding's, if they are one trainable parameter, which every checkpoint calls so."""
    table, head = base.get_input_embeddings(), base.get_output_embeddings()
    shared = getattr(head, "weight", None) is table.weight and table.weight.requires_grad
    names = {module: name for name, module in model.named_modules()} if shared else {}
    return {f"{names[head]}.weight": f"{names[table]}.weight"} if shared else {}


def prepared(
    part: torch.nn.Module,
    inner: PreTrainedModel,
    plan: Plan,
    precision: Precision,
    parts: TensorParts | None,
    stage: int,
) -> TokenLossSum:
    """One stage with its recomputing, compiling and loss."""
    checkpoint_activations(inner, decoder_layers(inner), plan.activation_checkpointing)
    last = plan.pp * plan.virtual_stages - 1
    losses = token_loss
    if compiles(plan):
        compile_layers(decoder_layers(inner))
        losses = compiled_token_loss()
    return TokenLossSum(part, inner, precision, parts, stage == 0, stage == last, losses)


def compiles(plan: Plan) -> bool:
    """Whether a plan's layers are compiled here; what stands in the way is said, and costs speed alone."""
    reason = why_not(local_device(plan)) if plan.compiled else None
    if reason and os.environ.get("RANK", "0") == "0":
        say(f"the plan compiles decoder layers, and here they run uncompiled: {reason}")
    return plan.compiled and reason is None


def shard(
    module: torch.nn.Module, base: PreTrainedModel, mesh: DeviceMesh, early: torch.dtype | None, piped: bool
) -> None:
    """FSDP2 in place: a group a decoder layer, one each for the tables, the rest in the root's.

    Tied tables must share a group, and it is the root's, since both the first and the last thing of a forward pass
    need it.

    Args:
        early: what autocast would cast the matrices of linear layers to. They are cast before they are gathered
            instead, with equal rounding: half the traffic, and no casts of the whole model kept for the backward
            pass. Everything else (norms, embeddings) is gathered as it is. None leaves all casting to autocast.
        piped: a pipeline stage, whose weights stay gathered from micro-batch to micro-batch.
    """
    of_matrices = MixedPrecisionPolicy(
        param_dtype=early, reduce_dtype=torch.float32 if early else None, cast_forward_inputs=False
    )
    for layer in decoder_layers(base):
        if early and (others := _with_own_weights_but_linear(layer)):
            fully_shard(others, mesh=mesh, reshard_after_forward=False)
        fully_shard(layer, mesh=mesh, reshard_after_forward=not piped, mp_policy=of_matrices)
    first, last = base.get_input_embeddings(), base.get_output_embeddings()
    if getattr(first, "weight", None) is not getattr(last, "weight", None):
        if next(first.parameters(), None) is not None:
            fully_shard(first, mesh=mesh, reshard_after_forward=not piped)
        if next(last.parameters(), None) is not None:
            fully_shard(last, mesh=mesh, reshard_after_forward=not piped, mp_policy=of_matrices)
    fully_shard(module, mesh=mesh)
    for sharded in module.modules():
        # Sums: a mean over 3 ranks would be a third in float32, whatever the type.
        if isinstance(sharded, FSDPModule):
            sharded.set_force_sum_reduction_for_comms(True)
            sharded.set_gradient_divide_factor(1.0)


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
