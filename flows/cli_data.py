"""`elastane data` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tasks.params import read_params
from tasks.paths import Paths


def data(
    split: Annotated[Literal["train", "validation"], typer.Option(help="Whose rows to show.")] = "train",
    row: Annotated[list[int] | None, typer.Option(help="A row to show, from 0; may be given again.")] = None,
    count: Annotated[int, typer.Option(min=0, help="Rows to show where none is named.")] = 2,
    picture: Annotated[Path | None, typer.Option(help="A PNG to write all of it to as well.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """What was prepared: sources, lengths, what was left out and why, and rows with their learnt tokens."""
    paths = Paths.here()
    from tasks.commands.data import look

    view = look(read_params(paths.params), paths, split, row, count)
    if picture is not None:
        from tasks.commands.data_picture import write_picture

        write_picture(view, picture)
    if json:
        print(view.to_json())
        return
    from rich.console import Console

    from tasks.commands.data_text import show

    show(view, Console())
