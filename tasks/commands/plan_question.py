"""What `elastane plan` is asked, and the search that it means."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tasks.commands.plan_model import model_config
from tasks.commands.plan_pins import merged, options_of
from tasks.contracts import DataManifest, HardwareProfile, ModelSpec, Precision, Rates
from tasks.errors import UserError
from tasks.params import Params
from tasks.paths import Paths
from tasks.planner.capabilities import EVERYTHING
from tasks.planner.hardware_names import named_hardware
from tasks.planner.model_spec import lora_shapes, model_spec
from tasks.planner.problem import Pins, Problem
from tasks.planner.vision import image_tokens
from tasks.planner.workload import Method, Workload
from tasks.probe.rates import cached_rates
from tasks.probe_hardware import read_machine
from tasks.select_strategy import as_problem, natural_precision, read_config, resolve, run_steps
from tasks.trials import read_corrections

ROW = 2048  # tokens of a row where nothing is said
TEXT = 512  # tokens of text beside a row's images where nothing is said
BATCH = 64
EVALUATION_ROWS = 8  # as evaluate.batch_size in the params.yaml that comes with the project
LORA_RANK = 16


@dataclass(frozen=True)
class Question:
    """What was asked; None is taken from the workspace, or said as a note where there is none."""

    model: str | None = None
    hardware: str | None = None
    method: Method | None = None
    sequence: int | None = None
    mean_row: float | None = None
    batch: int | None = None
    precision: Precision | None = None
    lora_rank: int | None = None
    image_size: tuple[int, int] | None = None
    images: int | None = None
    evaluation_rows: int | None = None
    pins: Pins = field(default_factory=Pins)


def ask(question: Question, workspace: tuple[Params, Paths] | None) -> tuple[str, Problem, list[str]]:
    """Name, search and notes of a question.

    Raises:
        UserError: an unknown model or machine, or a value that does not go with them.
    """
    device = workspace[0].probe_hardware.device if workspace else "auto"
    hardware, rates = _hardware(question, device)
    notes = list(hardware.notes) if question.hardware else []
    if question.model is None:
        if workspace is None:
            raise UserError(
                "there is no params.yaml here to take the recipe from; give --model, or change folder"
            )
        name, problem = _of_workspace(question, *workspace, hardware)
    else:
        name, problem = question.model, _of_model(question, hardware, notes)
    problem = problem.changed(
        rates=rates, pins=merged(problem.pins, question.pins), options=_options(question)
    )
    if question.lora_rank is not None and problem.work.method == "full":
        raise UserError(
            f"--lora-rank={question.lora_rank} is of no use: full tuning trains no adapters; leave it out, or use "
            "--method lora"
        )
    check(problem)
    work, most = problem.work, problem.spec.max_positions
    if most and work.sequence > most:
        notes.append(f"rows of {work.sequence} tokens are longer than the {most} the model was made for")
    return name, problem, notes


def check(problem: Problem) -> None:
    """Whether the recipe goes with the model.

    Raises:
        UserError: rows too long or rank too large for it.
    """
    work, spec = problem.work, problem.spec
    if work.mean_row > work.sequence:
        raise UserError(
            f"--mean-len={work.mean_row:g} is more than --seq-len={work.sequence}, the longest row; lower it"
        )
    if spec.position == "learned" and work.sequence > spec.max_positions:
        raise UserError(
            f"--seq-len={work.sequence} is more than the model's {spec.max_positions} learned positions; "
            "use at most so many"
        )
    if work.method != "full":
        lora_shapes(spec, work.lora_targets)
        if work.lora_rank > spec.hidden:
            raise UserError(
                f"--lora-rank={work.lora_rank} is more than hidden_size={spec.hidden}, so adapters would be larger "
                "than what they adapt; use at most so many, usually 8 to 128"
            )


def _options(question: Question) -> dict[str, str]:
    """How values are written here: every one where --model is said, else those that replace params.yaml's."""
    found = options_of(question.pins)
    for name, option, value in (
        ("method", "--method", question.method),
        ("sequence", "--seq-len", question.sequence),
        ("evaluation_rows", "--eval-rows", question.evaluation_rows),
    ):
        if question.model is not None or value is not None:
            found[name] = f"{option} {{}}"
    return found


def _hardware(question: Question, device: Any) -> tuple[HardwareProfile, Rates | None]:
    if question.hardware is not None:
        return named_hardware(question.hardware), None
    here = read_machine(device, os.environ, Path("/"))
    return here, cached_rates(here)


def _of_workspace(
    question: Question, params: Params, paths: Paths, hardware: HardwareProfile
) -> tuple[str, Problem]:
    if question.image_size is not None or question.images is not None:
        said = "--image-size" if question.image_size is not None else "--images"
        raise UserError(
            f"{said} is of no use without --model: the prepared rows hold no images; name a model too"
        )
    manifest = DataManifest.read(paths.manifest)
    spec = model_spec(read_config(paths.base / "config.json"))
    precision = question.precision or resolve(params.train, hardware).precision
    problem = as_problem(params, manifest, hardware, spec, precision, EVERYTHING)
    work = replace(
        problem.work,
        method=question.method or problem.work.method,
        sequence=question.sequence or problem.work.sequence,
        mean_row=question.mean_row or min(problem.work.mean_row, question.sequence or problem.work.mean_row),
        lora_rank=question.lora_rank or problem.work.lora_rank,
    )
    return params.model.name_or_path, problem.changed(
        work=work,
        batch=question.batch or problem.batch,
        evaluation_rows=question.evaluation_rows or problem.evaluation_rows,
        steps=run_steps(params.train, manifest, question.batch or problem.batch, hardware),
    )


def _of_model(question: Question, hardware: HardwareProfile, notes: list[str]) -> Problem:
    spec = model_spec(model_config(question.model or ""))
    tokens, tiles = images_of(question, spec)
    sequence = question.sequence or _usual_row(spec, tokens)
    if question.sequence is None:
        why = f": {tokens} of images and {sequence - tokens} of text" if tokens else ""
        notes.append(f"--seq-len is not said: rows of {sequence} tokens are taken{why}")
    if question.mean_row is None:
        notes.append(
            f"--mean-len is not said: every row is taken to be as long as the longest, {sequence} tokens"
        )
    if question.batch is None:
        notes.append(f"--global-batch is not said: {BATCH} rows a step are taken")
    work = Workload(
        method=question.method or "lora",
        precision=question.precision or natural_precision(hardware),
        sequence=sequence,
        mean_row=question.mean_row or sequence,
        lora_rank=question.lora_rank or LORA_RANK,
        tiles=tiles,
        longest_tiles=tiles,
    )
    if spec.vision is not None:
        notes.append(_about_images(question, spec, work, tokens))
    return Problem(
        spec,
        hardware,
        work,
        question.batch or BATCH,
        EVERYTHING,
        evaluation_rows=question.evaluation_rows or EVALUATION_ROWS,
        corrections=read_corrections(hardware) if question.hardware is None else {},
    )


def _usual_row(spec: ModelSpec, tokens: int) -> int:
    """A row where none is said: text alone, or images with some text, within what the model was made for."""
    usual = tokens + TEXT if tokens else ROW
    return max(tokens, min(usual, spec.max_positions or usual))


def images_of(question: Question, spec: ModelSpec) -> tuple[int, int]:
    """Tokens and tiles that the images of a row take; none where the model sees no images.

    Raises:
        UserError: images were said and the model has no vision tower.
    """
    if spec.vision is None:
        if question.image_size is not None or question.images is not None:
            said = "--image-size" if question.image_size is not None else "--images"
            raise UserError(f"{said} is of no use: {question.model} has no vision tower; leave it out")
        return 0, 0
    side = spec.vision.image_size
    tokens, tiles = image_tokens(spec.vision, *(question.image_size or (side, side)))
    count = question.images or 1
    return tokens * count, tiles * count


def _about_images(question: Question, spec: ModelSpec, work: Workload, tokens: int) -> str:
    """What the images take, as a note; they are part of the rows' length."""
    assert spec.vision is not None
    side = spec.vision.image_size
    width, height = question.image_size or (side, side)
    count = question.images or 1
    for name, length in (("--seq-len", work.sequence), ("--mean-len", work.mean_row)):
        if length < tokens:
            raise UserError(
                f"{name}={length:g} is less than the {tokens} tokens of a row's {count} image(s); "
                f"set it above {tokens}, or use smaller images"
            )
    said = "" if question.image_size else " (--image-size is not said: the tower's own size)"
    return f"{count} image(s) of {width}x{height} pixels are {tokens} tokens and {work.longest_tiles} tiles{said}"
