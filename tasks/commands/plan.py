"""`elastane plan`: what a recipe needs and how fast it is, on hardware that need not be here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tasks.commands.plan_model import model_config
from tasks.contracts import DataManifest, HardwareProfile, ModelSpec, PlanReport, Precision, Rates, Resolved
from tasks.errors import UserError
from tasks.params import Params
from tasks.paths import Paths
from tasks.planner.capabilities import EVERYTHING, TRAINABLE_NOW
from tasks.planner.explain import report as plan_report
from tasks.planner.hardware_names import named_hardware
from tasks.planner.model_spec import lora_shapes, model_spec
from tasks.planner.problem import Pins, Problem
from tasks.planner.search import search
from tasks.planner.vision import image_tokens
from tasks.planner.workload import Method, Workload
from tasks.probe.rates import cached_rates
from tasks.probe_hardware import read_machine
from tasks.select_strategy import as_problem, natural_precision, read_config, resolve

ROW = 2048  # tokens of a row where nothing is said
BATCH = 64


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
    images: int = 1
    pins: Pins = field(default_factory=Pins)


@dataclass(frozen=True)
class Answer:
    """The report, and beside it what a reader needs to know: the question in full, notes, what is trained today."""

    name: str
    problem: Problem
    report: PlanReport
    notes: tuple[str, ...]
    today: str

    def document(self) -> dict[str, Any]:
        """One JSON object."""
        work = self.problem.work
        return {
            "model": self.name,
            "method": work.method,
            "precision": work.precision,
            "sequence": work.sequence,
            "mean_row": work.mean_row,
            "global_batch": self.problem.batch,
            "hardware": self.problem.hardware.model_dump(mode="json"),
            "notes": list(self.notes),
            "trained_by_this_version": trained(self.problem, self.report.chosen.plan),
            "today": self.today,
            **self.report.model_dump(mode="json"),
        }


def plan(question: Question, workspace: tuple[Params, Paths] | None) -> Answer:
    """Searches everything for what was asked.

    Raises:
        UserError: an unknown model or machine, a pin that breaks a rule, or nothing fits.
    """
    name, problem, notes = ask(question, workspace)
    found = search(problem)
    resolved = Resolved(precision=problem.work.precision, token_budget=None)
    report = plan_report(problem, found, resolved)
    return Answer(name, problem, report, tuple(notes), _today(problem, report))


def trained(problem: Problem, plan: Any) -> bool:
    """Whether this version of elastane trains the plan."""
    return TRAINABLE_NOW.can(plan, problem.work, len(problem.hardware.gpus))


def _today(problem: Problem, report: PlanReport) -> str:
    """What this version would train instead, where it cannot train the choice."""
    if trained(problem, report.chosen.plan):
        return ""
    if problem.work.method not in TRAINABLE_NOW.methods or problem.work.longest_tiles:
        what = problem.work.method if not problem.work.longest_tiles else "training with images"
        return f"{what} is planned, not yet trained by this version"
    pins = problem.pins
    free = Pins(gpus=pins.gpus, micro_batch=pins.micro_batch, accumulation=pins.accumulation)
    try:
        best = search(problem.changed(capabilities=TRAINABLE_NOW, pins=free)).fitting[0]
    except UserError as error:
        return f"of the plans that this version trains (one process or DDP on one machine) none fits: {error}"
    from tasks.planner.words import settings

    speed = best.estimate.tokens_per_second if best.estimate else 0.0
    return f"this version would train it as {settings(best.plan)}, predicted {speed:,.0f} tokens/s"


# --- the question as a search -------------------------------------------------------------------


def ask(question: Question, workspace: tuple[Params, Paths] | None) -> tuple[str, Problem, list[str]]:
    """Name, search and notes of a question.

    Raises:
        UserError: see plan.
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
    problem = problem.changed(rates=rates, pins=_merged(problem.pins, question.pins))
    _check(problem, notes)
    return name, problem, notes


def _hardware(question: Question, device: Any) -> tuple[HardwareProfile, Rates | None]:
    if question.hardware is not None:
        return named_hardware(question.hardware), None
    here = read_machine(device, os.environ, Path("/"))
    return here, cached_rates(here)


def _of_workspace(
    question: Question, params: Params, paths: Paths, hardware: HardwareProfile
) -> tuple[str, Problem]:
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
    return params.model.name_or_path, problem.changed(work=work, batch=question.batch or problem.batch)


def _of_model(question: Question, hardware: HardwareProfile, notes: list[str]) -> Problem:
    spec = model_spec(model_config(question.model or ""))
    sequence = question.sequence or ROW
    if question.sequence is None:
        notes.append(f"--seq-len is not said: rows of {ROW} tokens are taken")
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
        lora_rank=question.lora_rank or 16,
    )
    work = _with_images(question, spec, work, notes)
    return Problem(spec, hardware, work, question.batch or BATCH, EVERYTHING, evaluation_rows=1)


def _with_images(question: Question, spec: ModelSpec, work: Workload, notes: list[str]) -> Workload:
    """Image tokens are part of the rows' length; tiles are what the tower computes."""
    if spec.vision is None:
        if question.image_size is not None:
            raise UserError(f"--image-size is of no use: {question.model} has no vision tower; leave it out")
        return work
    side = spec.vision.image_size
    width, height = question.image_size or (side, side)
    tokens, tiles = image_tokens(spec.vision, width, height)
    tokens, tiles = tokens * question.images, tiles * question.images
    said = "" if question.image_size else " (--image-size is not said: the tower's own size)"
    notes.append(
        f"{question.images} image(s) of {width}x{height} pixels are {tokens} tokens and {tiles} tiles{said}"
    )
    for name, length in (("--seq-len", work.sequence), ("--mean-len", work.mean_row)):
        if length < tokens:
            raise UserError(
                f"{name}={length:g} is less than the {tokens} tokens of a row's {question.images} image(s); "
                f"set it above {tokens}, or use smaller images"
            )
    return replace(work, tiles=tiles, longest_tiles=tiles)


def _merged(said: Pins, asked: Pins) -> Pins:
    """Pins of the command over those of params.yaml."""
    changes = {
        field.name: value for field in fields(Pins) if (value := getattr(asked, field.name)) is not None
    }
    return replace(said, **changes)


def _check(problem: Problem, notes: list[str]) -> None:
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
    if spec.max_positions and work.sequence > spec.max_positions:
        notes.append(
            f"rows of {work.sequence} tokens are longer than the {spec.max_positions} the model was made for"
        )
    if work.method != "full":
        lora_shapes(spec, work.lora_targets)


# --- pins ---------------------------------------------------------------------------------------


def parse_pins(words: Sequence[str]) -> Pins:
    """`key=value` words as pins.

    Raises:
        UserError: an unknown key, or a value that is no number where one is needed.
    """
    known = {part.name: part for part in fields(Pins)}
    found: dict[str, Any] = {}
    for word in words:
        key, _, value = word.partition("=")
        key = {
            "dp": "data_parallel",
            "micro": "micro_batch",
            "checkpointing": "activation_checkpointing",
        }.get(key, key)
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
            found[key] = value
    return Pins(**found)


WORDS = {
    "activation_checkpointing": ("none", "selective", "full"),
    "engine": ("torch", "deepspeed"),
    "backend": ("nccl", "gloo"),
    "sharding": ("none", "fsdp2", "zero1", "zero2", "zero3"),
    "offload": ("none", "cpu", "nvme"),
    "offload_parameters": ("none", "cpu", "nvme"),
    "schedule": ("none", "gpipe", "1f1b", "interleaved1f1b", "zerobubble"),
    "replication": ("ddp", "data_parallel"),
}
