"""config.json -> ModelSpec: shapes and exact parameter counts, without loading or importing a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tasks.contracts import ModelSpec
from tasks.errors import UserError
from tasks.planner.config_values import ConfigValues
from tasks.planner.decoder import Shapes, decoder_spec, shapes
from tasks.planner.families import FAMILIES
from tasks.planner.vision import VISION_FAMILIES, vision_spec


def model_spec(config: Mapping[str, object]) -> ModelSpec:
    """Reads a model's shapes from a Hugging Face config, of a decoder or of a decoder with a vision tower.

    Raises:
        UserError: an unsupported model_type, a size that is no positive number, or sizes that do not go together.
    """
    values = ConfigValues(config)
    if values.get("model_type") not in VISION_FAMILIES:
        return decoder_spec(values)
    text = values.section("text_config")
    tied = values.flag("tie_word_embeddings") or text.flag("tie_word_embeddings")
    text = text.changed(model_type=text.get("model_type") or "llama", tie_word_embeddings=tied)
    decoder = decoder_spec(text)
    vision = vision_spec(values, decoder.hidden)
    parameters = decoder.parameters + vision.tower_parameters + vision.projector_parameters
    return decoder.model_copy(update={"vision": vision, "parameters": parameters})


def matmul_parameters(spec: ModelSpec) -> int:
    """Parameters that some token is multiplied with: all but an input table that is no output head too."""
    return spec.parameters - (0 if spec.tied_embeddings else spec.embedding_parameters)


def active_parameters(spec: ModelSpec) -> int:
    """Parameters that one text token is multiplied with.

    Left out are routed experts it is not sent to, an input table that is no output head too, a learned table of
    positions, and the vision tower and its projector, which only images pass. N of the 2N FLOPs a token and forward
    pass (arXiv:2001.08361, section 2.1).
    """
    count = matmul_parameters(spec)
    if spec.position == "learned":
        count -= spec.max_positions * spec.hidden
    if spec.moe is not None:
        count -= spec.moe.parameters // spec.moe.experts * (spec.moe.experts - spec.moe.active)
    if spec.vision is not None:
        count -= spec.vision.tower_parameters + spec.vision.projector_parameters
    return count


def lora_shapes(spec: ModelSpec, targets: str | Sequence[str]) -> Shapes:
    """The linear modules of one decoder layer that get an adapter; neither routed experts nor a vision tower do.

    Raises:
        UserError: a target is no linear module of the decoder layer.
    """
    return _targeted(spec, spec.linear_shapes, targets)


def lora_parameters(spec: ModelSpec, rank: int, targets: str | Sequence[str]) -> int:
    """Adapter parameters: r (d_in + d_out) for every target of every layer (LoRA, arXiv:2106.09685).

    Raises:
        UserError: a target is no linear module of the decoder layer.
    """
    return sum(
        layers * rank * (d_in + d_out)
        for layers, kind in _layer_kinds(spec)
        for _, d_in, d_out in _targeted(spec, kind, targets)
    )


def _targeted(spec: ModelSpec, kind: Shapes, targets: str | Sequence[str]) -> Shapes:
    if isinstance(targets, str):  # "all-linear", the only word params.yaml allows
        return kind
    names = list(dict.fromkeys(name for _, layer in _layer_kinds(spec) for name, _, _ in layer))
    wanted = {target.rsplit(".", 1)[-1]: target for target in targets}
    for name, target in wanted.items():
        if name not in names:
            raise UserError(
                f"train.lora.targets names {target!r}, which is no linear module of a {spec.family} layer; "
                f"use all-linear or some of {', '.join(names)}"
            )
    return tuple(shape for shape in kind if shape[0] in wanted)


def _layer_kinds(spec: ModelSpec) -> tuple[tuple[int, Shapes], ...]:
    """How many layers have which linears: a mixture of experts may have layers with an ordinary MLP instead."""
    if spec.moe is None or not spec.moe.dense_layers:
        return ((spec.layers, spec.linear_shapes),)
    family = FAMILIES[spec.family]
    shared = {name for name, *_ in family.experts.shared} if family.experts else set()
    attention = tuple(shape for shape in spec.linear_shapes if shape[0] not in shared)
    mlp = shapes(family.mlp, {"hidden": spec.hidden, "ffn": spec.ffn})
    return (
        (spec.layers - spec.moe.dense_layers, spec.linear_shapes),
        (spec.moe.dense_layers, attention + mlp),
    )
