"""`elastane plan` on the command line."""

from __future__ import annotations

import json as json_
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tasks.errors import UserError
from tasks.params import Params, read_params
from tasks.paths import Paths
from tasks.stage import say

if TYPE_CHECKING:
    from tasks.commands.plan_question import Question


def _number(text: str) -> Any:
    return typer.Option(min=1, help=text)


Model = Annotated[str | None, typer.Option(help="Folder, config.json, Hugging Face id or short name.")]
Hardware = Annotated[str | None, typer.Option(help="Such as '8xA100-80G x 4 nodes IB400'.")]
Method = Annotated[Literal["full", "lora", "qlora"] | None, typer.Option(help="Default: lora.")]
Longest = Annotated[int | None, _number("Longest row in tokens, images included.")]
Mean = Annotated[float | None, _number("Average row in tokens.")]
Batch = Annotated[int | None, _number("Rows an optimizer step.")]
Precision = Annotated[Literal["float32", "bfloat16", "float16"] | None, typer.Option()]
Size = Annotated[str | None, typer.Option(help="WIDTHxHEIGHT in pixels, for vision models.")]
Images = Annotated[int | None, _number("Images a row (default: 1).")]
Scored = Annotated[int | None, _number("Rows scored at once in evaluation (default: 8).")]
Gpus = Annotated[int | None, _number("Use at most so many GPUs.")]
Number = Annotated[int | None, typer.Option(min=1)]
Schedule = Annotated[
    Literal["gpipe", "1f1b", "interleaved1f1b", "zerobubble"] | None,
    typer.Option(help="How a pipeline's stages take turns."),
]
Sharding = Annotated[
    Literal["none", "fsdp2", "zero0", "zero1", "zero2", "zero3"] | None,
    typer.Option(help="How data-parallel ranks share; zero0 to zero3 are DeepSpeed's."),
]
Offload = Annotated[
    Literal["none", "cpu", "nvme"] | None,
    typer.Option(help="Where zero2 and zero3 keep optimizer state; --offload-parameters: zero3's weights."),
]
Pin = Annotated[list[str] | None, typer.Option(help="More pins, such as engine=deepspeed or compile=true.")]
Picture = Annotated[Path | None, typer.Option(help="Write memory and time of the best plans as a PNG.")]
WhatHardware = Annotated[bool, typer.Option("--what-hardware", help="Smallest machines that fit.")]
Largest = Annotated[bool, typer.Option("--largest", help="Largest model and longest row that fit.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def plan(  # noqa: PLR0913, PLR0917 - one argument an option
    model: Model = None,
    hardware: Hardware = None,
    method: Method = None,
    seq_len: Longest = None,
    mean_len: Mean = None,
    global_batch: Batch = None,
    precision: Precision = None,
    lora_rank: Number = None,
    image_size: Size = None,
    images: Images = None,
    eval_rows: Scored = None,
    gpus: Gpus = None,
    micro_batch: Number = None,
    dp: Number = None,
    tp: Number = None,
    pp: Number = None,
    schedule: Schedule = None,
    sharding: Sharding = None,
    offload: Offload = None,
    offload_parameters: Offload = None,
    pin: Pin = None,
    picture: Picture = None,
    what_hardware: WhatHardware = False,
    largest: Largest = False,
    json: Json = False,
) -> None:
    """What a recipe needs and how fast it is, here or on hardware that is only named."""
    from tasks.commands.plan_pins import parse_pins
    from tasks.commands.plan_question import Question

    _agree(what_hardware, largest, hardware, picture)
    said = {"gpus": gpus, "micro_batch": micro_batch, "dp": dp, "tp": tp, "pp": pp, "schedule": schedule}
    said |= {"sharding": sharding, "offload": offload, "offload_parameters": offload_parameters}
    words = [*(pin or []), *(f"{key}={value}" for key, value in said.items() if value)]
    question = Question(
        model=model,
        hardware=hardware,
        method=method,
        sequence=seq_len,
        mean_row=mean_len,
        batch=global_batch,
        precision=precision,
        lora_rank=lora_rank,
        image_size=_pixels(image_size),
        images=images,
        evaluation_rows=eval_rows,
        pins=parse_pins(words),
    )
    if what_hardware or largest:
        _inverse(question, what_hardware, json)
    else:
        _forward(question, picture, json)


def _forward(question: Question, picture: Path | None, json: bool) -> None:
    from tasks.commands.plan import plan as answer_of
    from tasks.commands.plan_text import lines

    answer = answer_of(question, _workspace())
    if picture is not None:
        from tasks.commands.plan_picture import write_picture

        write_picture(answer.report, picture, answer.name)
        say(f"plan: {picture} shows the best plans")
    _print(answer.document(), lines(answer), json)


def _inverse(question: Question, what_hardware: bool, json: bool) -> None:
    from tasks.commands import plan_inverse as inverse
    from tasks.commands.plan_text import inverse_lines

    found = (inverse.what_hardware if what_hardware else inverse.largest)(question, _workspace())
    _print(found.document(), inverse_lines(found), json)


def _print(document: dict[str, Any], lines: list[str], json: bool) -> None:
    print(json_.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) if json else "\n".join(lines))


def _agree(what_hardware: bool, largest: bool, hardware: str | None, picture: Path | None) -> None:
    """Options that say nothing beside each other are errors."""
    if what_hardware and largest:
        raise UserError("--what-hardware and --largest are two questions; ask one at a time")
    if what_hardware and hardware is not None:
        raise UserError(
            f"--what-hardware looks for hardware and --hardware={hardware!r} names some; leave one of them out"
        )
    if picture is not None and (what_hardware or largest):
        asked = "--what-hardware" if what_hardware else "--largest"
        raise UserError(
            f"--picture={picture} draws the plans of one recipe on one machine, and {asked} asks of many; "
            "leave one of them out"
        )


def _pixels(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)[x×](\d+)", text)
    if found is None:
        raise UserError(f"--image-size {text} is no WIDTHxHEIGHT in pixels; write it as 672x672")
    return int(found.group(1)), int(found.group(2))


def _workspace() -> tuple[Params, Paths] | None:
    if not (Path.cwd() / "params.yaml").is_file():
        return None
    paths = Paths.here()
    return read_params(paths.params), paths
