"""The `elastane` command. Everything heavy is imported by the command that needs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from flows.cli_certify import certify
from flows.cli_data import data
from flows.cli_plan import plan
from tasks.errors import USER_ERROR_EXIT_CODE, UserError
from tasks.params import Params, read_params
from tasks.paths import Paths
from tasks.sampling import Sampling
from tasks.stage import say

app = typer.Typer(
    help="Fine-tunes language models on whatever GPUs there are. Run it in the folder of params.yaml.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, all else on stderr.")]

Model = Annotated[
    str | None, typer.Option(help="A registered version, models:/name/3 or models:/name@alias.")
]
MaxNewTokens = Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token; above, it is drawn.")]
TopP = Annotated[float, typer.Option(help="Draw from the likeliest tokens that make up this share.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Of what is drawn; the recipe's by default.")]


def main() -> None:
    """Entry point: a user's mistake ends in one sentence and code 2."""
    try:
        app()
    except UserError as error:
        say(f"elastane: {error}")
        sys.exit(USER_ERROR_EXIT_CODE)


def _here() -> tuple[Params, Paths]:
    paths = Paths.here()
    return read_params(paths.params), paths


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Turns SIGTERM into an exception, so that what a cancelled run started is killed on the way out."""
    import signal

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@app.command()
def run(
    retrain: Annotated[bool, typer.Option(help="Train anew although nothing changed.")] = False,
    json: Json = False,
) -> None:
    """The whole pipeline, once: only what is out of date runs."""
    params, paths = _here()
    from flows.embedded import prefect_api
    from flows.workspace import flow_lock

    with flow_lock(paths):
        pass  # Asked before the seconds that Prefect takes; the flow takes the lock for itself.
    with _ended_by_signals(), prefect_api(paths):
        from flows.finetune import finetune
        from flows.process import StageFailed

        try:
            outcome = finetune(str(paths.root), retrain)
        except StageFailed as error:
            say(f"elastane: {error}")
            raise SystemExit(error.code if error.users_mistake else 1) from None
    from rich.console import Console

    from flows.summary import show, summarize

    summary = summarize(params, paths, outcome.ran)
    show(summary, Console(stderr=json))
    if json:
        print(summary.model_dump_json(indent=2))


@app.command()
def probe(
    measure: Annotated[bool, typer.Option("--measure", help="Measure speeds too, once a machine.")] = False,
    json: Json = False,
) -> None:
    """What hardware is here, as the planner sees it."""
    params, paths = _here()
    from tasks.commands.probe import document, lines
    from tasks.probe.rates import cached_rates
    from tasks.probe_hardware import read_machine

    profile = read_machine(params.probe_hardware.device, os.environ, Path("/"))
    rates = cached_rates(profile) if measure else None
    if measure and rates is None:
        from tasks.commands.measure import measured_rates

        rates = measured_rates(profile, paths.root)
    print(document(profile, rates) if json else "\n".join(lines(profile, rates)))


app.command()(plan)
app.command()(certify)
app.command()(data)


@app.command()
def generate(  # noqa: PLR0913, PLR0917 - one argument an option
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts, each in quotes.")] = None,
    file: Annotated[Path | None, typer.Option(help="A file with a prompt a line.")] = None,
    max_new_tokens: MaxNewTokens = None,
    base: Annotated[bool, typer.Option(help="Answer with the base model instead.")] = False,
    model: Model = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    json: Json = False,
) -> None:
    """Answers of the tuned model."""
    params, paths = _here()
    wanted = list(prompts or [])
    if file is not None:
        if not file.is_file():
            raise UserError(f"--file {file} does not exist; give a text file with a prompt a line")
        wanted += file.read_text(encoding="utf-8").splitlines()
    from tasks.commands.generate import generate as answer

    wanted = [prompt for prompt in wanted if prompt.strip()]
    answers = answer(params, paths, wanted, max_new_tokens, base, model, Sampling(temperature, top_p), seed)
    if json:
        from json import dumps

        pairs = [{"prompt": prompt, "answer": text} for prompt, text in zip(wanted, answers, strict=True)]
        print(dumps(pairs, indent=2, ensure_ascii=False))
        return
    for prompt, text in zip(wanted, answers, strict=True):
        print(f"> {prompt}\n{text}\n")


@app.command()
def chat(
    max_new_tokens: MaxNewTokens = None,
    model: Model = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
) -> None:
    """A conversation with the tuned model."""
    params, paths = _here()
    from tasks.commands.chat import chat as talk

    talk(params, paths, max_new_tokens, model, Sampling(temperature, top_p), seed)


@app.command()
def export(
    output: Annotated[Path, typer.Argument(help="The folder to write; it must not exist or be empty.")],
    merge: Annotated[bool, typer.Option(help="Whole weights instead of the adapter alone.")] = False,
    model: Model = None,
    step: Annotated[int | None, typer.Option(min=1, help="A step whose checkpoint is still there.")] = None,
) -> None:
    """Writes the tuned model as a Hugging Face (or PEFT) folder and checks that it opens."""
    params, paths = _here()
    from tasks.commands.export import export as write

    print(write(params, paths, output, merge, model, step))


@app.command()
def reproduce(
    uri: Annotated[str, typer.Argument(help="models:/name/3 or models:/name@alias")],
    json: Json = False,
) -> None:
    """Replays a registered version from its commit, parameters and data, and compares."""
    params, paths = _here()
    from tasks.commands.reproduce import reproduce as replay

    report = replay(params, paths, uri)
    print(report.to_json() if json else report.table(), end="" if json else "\n")
    if not report.same:
        raise SystemExit(1)


@app.command()
def deploy(
    cron: Annotated[str | None, typer.Option(help="When to run, as cron says it: '0 3 * * *'.")] = None,
) -> None:
    """Puts the pipeline on a schedule at your Prefect server."""
    _, paths = _here()
    from flows.deploy import deploy as put

    say(put(paths, cron))


if __name__ == "__main__":
    main()
