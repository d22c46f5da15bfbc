"""An answer of `elastane plan` as text."""

from __future__ import annotations

from tasks.commands.plan import Answer, trained
from tasks.contracts import HardwareProfile
from tasks.planner.explain import SHOWN, bars, cost_of, distinct, row
from tasks.planner.words import gib, moment, settings

MARK = "(planned, not yet trained by this version)"


def lines(answer: Answer) -> list[str]:
    """The question, the choice with its memory and time, runners-up, rejections and advice."""
    problem, report = answer.problem, answer.report
    spec, work = problem.spec, problem.work
    lora = f" rank {work.lora_rank}" if work.method != "full" else ""
    found = [
        f"model     {answer.name}: {spec.parameters / 1e9:.2f} B parameters ({spec.family}), {spec.layers} layers",
        f"recipe    {work.method}{lora}, {work.precision}, rows up to {work.sequence} tokens (mean {work.mean_row:g}), "
        f"global batch {problem.batch}",
        f"hardware  {_hardware(problem.hardware)}"
        + (", with rates measured here" if problem.machine.measured else ""),
        *(f"note      {note}" for note in answer.notes),
        "",
        *_choice(answer),
        "",
        f"{'runners-up':10} {'plan':14} {'micro':>5} {'accum':>5} {'checkpointing':13} {'GiB':>7} {'tokens/s':>12}",
    ]
    others = [c for c in distinct((report.chosen, *report.runners_up)) if c is not report.chosen]
    for candidate in others[:SHOWN]:
        found.append(row("", candidate) + ("" if trained(problem, candidate.plan) else f"  {MARK}"))
    found += ["", f"rejected   {report.unfit} layouts and levels need too much memory; the nearest:"]
    costed = [candidate for candidate in report.rejected if candidate.estimate is not None]
    found += [f"  {settings(c.plan)}: {c.rejected}" for c in costed[:SHOWN]]
    found += [f"ruled out  {c.rejected}" for c in report.rejected if c.estimate is None]
    return [*found, *(f"advice     {sentence}" for sentence in report.advice)]


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
        f"step      {cost.total_seconds:.3g} s, {cost.tokens_per_second:,.0f} tokens/s, MFU {cost.mfu:.0%}"
    )
    return found + bars(cost.seconds, cost.total_seconds, lambda value: f"{value:.3g} s")


def _hardware(hardware: HardwareProfile) -> str:
    if hardware.device == "cpu":
        what = f"{hardware.cpu_cores} CPU cores, {gib(hardware.host_memory_bytes)} GiB"
    else:
        gpu = hardware.gpus[0]
        what = f"{len(hardware.gpus)} x {gpu.name} ({gib(gpu.memory_bytes)} GiB)"
    nodes = f" x {hardware.nodes} nodes" if hardware.nodes > 1 else ""
    return what + nodes + (f", {hardware.fabric.name}" if hardware.fabric else "")
