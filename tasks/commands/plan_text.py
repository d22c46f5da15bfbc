"""An answer of `elastane plan` as text."""

from __future__ import annotations

from collections.abc import Sequence

from tasks.commands.plan import Answer, trained
from tasks.commands.plan_inverse import Inverse
from tasks.contracts import HardwareProfile
from tasks.planner.explain import CAPTION, SHOWN, bars, cost_of, counts, heading, name_width, row, runners_up
from tasks.planner.ground import either
from tasks.planner.problem import Problem
from tasks.planner.words import gib, moment, seconds, settings

MARK = "(planned, not yet trained by this version)"


def lines(answer: Answer) -> list[str]:
    """The question, the choice with its memory and time, runners-up, rejections and advice."""
    problem, report = answer.problem, answer.report
    others = runners_up(report)[:SHOWN]
    width = name_width([report.chosen, *others])
    found = [
        *header(answer.name, problem, answer.notes),
        "",
        *_choice(answer),
        "",
        *([f"runners-up {CAPTION}", heading("", width)] if others else []),
    ]
    for candidate in others:
        found.append(row("", candidate, width) + ("" if trained(problem, candidate.plan) else f"  {MARK}"))
    found += ["", *(f"counted    {sentence}" for sentence in counts(report, "--json"))]
    costed = [candidate for candidate in report.rejected if candidate.estimate is not None]
    found += [f"too large  {settings(c.plan)}: {c.rejected}" for c in costed[:SHOWN]]
    found += [f"ruled out  {c.rejected}" for c in report.rejected if c.estimate is None]
    return [*found, *(f"advice     {sentence}" for sentence in report.advice)]


def inverse_lines(answer: Inverse) -> list[str]:
    """The question, and a line an answer."""
    width = max(len(line.what) for line in answer.lines)
    head = header(answer.name, answer.problem, answer.notes, answer.machine, answer.methods)
    return [*head, "", *(line.text(width) for line in answer.lines)]


def header(
    name: str, problem: Problem, notes: Sequence[str], machine: bool = True, methods: Sequence[str] = ()
) -> list[str]:
    """What was asked: model (if there is one), recipe, hardware (if `machine`), and what was assumed."""
    spec, work = problem.spec, problem.work
    methods = methods or (work.method,)
    rank = f"{' at' if len(methods) > 1 else ''} rank {work.lora_rank}"
    lora = rank if set(methods) != {"full"} else ""
    model = f"{name}: {spec.parameters / 1e9:.2f} B parameters ({spec.family}), {spec.layers} layers"
    rates = ", with rates measured here" if problem.machine.measured else ""
    return [
        *([f"model     {model}"] if name else []),
        f"recipe    {either(methods)}{lora}, {work.precision}, rows up to {work.sequence} tokens "
        f"(mean {work.mean_row:g}), global batch {problem.batch}",
        *([f"hardware  {_hardware(problem.hardware)}{rates}"] if machine else []),
        *(f"note      {note}" for note in notes),
    ]


def _choice(answer: Answer) -> list[str]:
    report, problem = answer.report, answer.problem
    plan, cost = report.chosen.plan, cost_of(report.chosen)
    host = sum(cost.host_bytes.values())
    where = "GPU" if problem.hardware.gpus else "process"
    found = [f"choice    {settings(plan)}" + ("" if trained(problem, plan) else f"  {MARK}")]
    found += [f"          {report.why.split(': ', 1)[1]}"]
    found += [f"today     {answer.today}"] if answer.today else []
    found.append(
        f"memory    {gib(cost.peak_bytes)} of {gib(cost.memory_limit_bytes)} GiB a {where} "
        f"({moment(cost)}); at a save {gib(cost.save_bytes)}, in evaluation {gib(cost.evaluation_bytes)}; "
        f"host {gib(host)} of {gib(cost.host_limit_bytes)} GiB a node"
    )
    found += bars(cost.memory_bytes, cost.total_bytes, gib)
    found.append(
        f"step      {seconds(cost.total_seconds)}, {cost.tokens_per_second:,.0f} tokens/s, MFU {cost.mfu:.0%}"
    )
    return found + bars(cost.seconds, cost.total_seconds, seconds)


def _hardware(hardware: HardwareProfile) -> str:
    if hardware.device == "cpu":
        what = f"{hardware.cpu_cores} CPU cores, {gib(hardware.host_memory_bytes)} GiB"
    else:
        gpu = hardware.gpus[0]
        what = f"{len(hardware.gpus)} x {gpu.name} ({gib(gpu.memory_bytes)} GiB)"
    nodes = f" x {hardware.nodes} nodes" if hardware.nodes > 1 else ""
    return what + nodes + (f", {hardware.fabric.name}" if hardware.fabric else "")
