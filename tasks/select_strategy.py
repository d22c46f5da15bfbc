"""Stage select_strategy: hardware, data and model config -> plan.json."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Mapping
from ctypes.util import find_library
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from tasks.contracts import DataManifest, HardwareProfile, ModelSpec, PlanReport, Precision, Resolved
from tasks.deepspeed_file import file_hash, read_wishes, with_passed_on, with_wishes
from tasks.errors import UserError
from tasks.params import Params, TrainParams
from tasks.paths import Paths
from tasks.planner.capabilities import TRAINABLE_NOW, ZERO, Capabilities
from tasks.planner.explain import report as plan_report
from tasks.planner.explain import table
from tasks.planner.model_spec import model_spec
from tasks.planner.problem import COMPILE_SECONDS, Pins, Problem
from tasks.planner.search import Found, search
from tasks.planner.workload import workload
from tasks.probe.rates import cached_rates
from tasks.stage import say, stage_main
from tasks.trials import by_measurement, learn, read_corrections, try_plans

BFLOAT16_CAPABILITY = (8, 0)
TRIAL_STEPS = 5


def select_strategy(params: Params, paths: Paths) -> PlanReport:
    """Costs every legal plan, writes plan.json with the best and says why on stderr.

    Raises:
        UserError: an input is missing, a pin breaks a rule, or nothing fits.
    """
    hardware = HardwareProfile.read(paths.hardware)
    manifest = DataManifest.read(paths.manifest)
    config = read_config(paths.base / "config.json")
    spec = model_spec(config)
    resolved = resolve(params.train, hardware)
    note = precision_note(resolved.precision, hardware)
    if note:
        say(note)
    check_deepspeed(params)
    trained = trainable(params, config)
    problem = as_problem(params, manifest, hardware, spec, resolved.precision, trained)
    wishes = read_wishes(params, paths, resolved.precision)
    if wishes is not None:
        problem = problem.changed(pins=with_wishes(problem.pins, wishes))
    found = search(problem)
    if params.select_strategy.trials:
        problem, found = with_trials(params, paths.base / "config.json", problem, found)
    report = plan_report(problem, found, resolved)
    chosen = report.chosen.model_copy(update={"plan": with_passed_on(report.chosen.plan, wishes)})
    report = report.model_copy(update={"chosen": chosen, "deepspeed_config": file_hash(params, paths)})
    report.write(paths.plan)
    say(table(report))
    return report


def trainable(params: Params, config: Mapping[str, object]) -> Capabilities:
    """What this version trains of a model here: one that runs its own code is neither cut over ranks nor over stages,
    and nobody knows what its attention makes of packed rows; without DeepSpeed there is neither ZeRO nor offload.
    """
    own_code = params.model.trust_remote_code and bool(config.get("auto_map"))
    none: frozenset[str] = frozenset()
    found = TRAINABLE_NOW
    if find_spec("deepspeed") is None:
        found = replace(found, shardings=found.shardings - ZERO, offload=False)
    found = replace(found, disk=can_build_async_io())
    return replace(found, split_families=none, isolating_families=none) if own_code else found


def can_build_async_io() -> bool:
    """Whether DeepSpeed could compile its op for NVMe here: a C++ compiler, ninja and libaio with its header."""
    tools = all(shutil.which(tool) for tool in ("c++", "ninja"))
    said = ":".join(os.environ.get(name, "") for name in ("CPATH", "CPLUS_INCLUDE_PATH")).split(":")
    folders = ["/usr/include", f"{sys.prefix}/include", *filter(None, said)]
    header = any((Path(folder) / "libaio.h").is_file() for folder in folders)
    libraries = filter(None, os.environ.get("LIBRARY_PATH", "").split(":"))
    known = find_library("aio") or any((Path(folder) / "libaio.so").exists() for folder in libraries)
    return tools and header and bool(known)


def check_deepspeed(params: Params) -> None:
    """Pins that need DeepSpeed, or its op for NVMe, where these are not installed.

    Raises:
        UserError: the first such pin.
    """
    strategy = params.select_strategy
    for key in ("engine", "sharding", "offload", "offload_parameters"):
        value = getattr(strategy, key)
        if value not in ("deepspeed", "cpu", "nvme") and not value.startswith("zero"):
            continue
        if find_spec("deepspeed") is None:
            raise UserError(
                f"select_strategy.{key}={value} needs DeepSpeed, which is not installed; pip install deepspeed, or set "
                "it to auto"
            )
        if value == "nvme" and not can_build_async_io():
            raise UserError(
                f"select_strategy.{key}=nvme needs DeepSpeed's async_io, which is compiled on first use; install a C++ "
                "compiler, ninja and libaio-dev, or use cpu"
            )


def as_problem(
    params: Params,
    manifest: DataManifest,
    hardware: HardwareProfile,
    spec: ModelSpec,
    precision: Precision,
    capabilities: Capabilities,
) -> Problem:
    """The recipe of params.yaml on prepared rows as a search; measured rates count where this machine has some.

    Raises:
        UserError: there are no rows, or they are packed and the model could not keep them apart.
    """
    if not manifest.train.rows:
        raise UserError("the training split has 0 rows, and at least 1 is needed; mend prepare_data.source")
    if manifest.packed and not capabilities.isolates(spec):
        raise UserError(
            f"prepare_data.packing=best_fit needs attention that keeps the documents of a row apart, and that is not "
            f"known of this {spec.family} model; use prepare_data.packing: none, and train.sample_order: by_length "
            "against padding"
        )
    return Problem(
        spec=spec,
        hardware=hardware,
        work=workload(params.train, manifest, precision),
        batch=params.global_batch,
        capabilities=capabilities,
        pins=Pins.of(params.select_strategy),
        margin=params.select_strategy.memory_margin,
        evaluation_rows=params.evaluate.batch_size,
        rates=cached_rates(hardware),
        corrections=read_corrections(hardware),
        steps=run_steps(params.train, manifest, params.global_batch, hardware),
    )


def run_steps(train: TrainParams, manifest: DataManifest, batch: int, hardware: HardwareProfile) -> int:
    """Optimizer steps of the run, as `SampleOrder.steps` counts them; a token budget is spent on average rows."""
    steps = max(1, round(train.num_train_epochs * math.ceil(manifest.samples / batch)))
    budget = resolve(train, hardware).token_budget
    if budget is None:
        return steps
    return max(1, min(steps, int(budget / (batch * manifest.train.tokens / manifest.samples))))


def with_trials(params: Params, config: Path, problem: Problem, found: Found) -> tuple[Problem, Found]:
    """Tries the best plans on this machine, corrects the estimates, and puts what was measured fastest first.

    Raises:
        UserError: all tried plans failed, or nothing fits any more.
    """
    tried = found.fitting[: params.select_strategy.trials]
    results = try_plans(config, tried, params.train, problem.work, problem.hardware, TRIAL_STEPS)
    compiling = COMPILE_SECONDS / problem.steps if problem.steps else 0.0
    ran, failed = by_measurement(tried, results, compiling)
    if not ran:
        raise UserError(
            f"all {len(tried)} tried plans failed ({results[0].failed}); set select_strategy.trials=0 to go on "
            "without trials, or mend what they say"
        )
    problem = problem.changed(corrections=learn(problem.hardware, problem.work, tried, results))
    again = search(problem)
    estimates = {candidate.plan: candidate for candidate in again.fitting}
    measured = [estimates.get(candidate.plan, candidate) for candidate in ran]
    done = {candidate.plan for candidate in tried}
    again.fitting = measured + [candidate for candidate in again.fitting if candidate.plan not in done]
    again.rejected = failed + again.rejected
    return problem, again


def resolve(train: TrainParams, hardware: HardwareProfile) -> Resolved:
    """What `auto` means on this machine: the precision every device is fast in, and the token budget."""
    precision: Precision
    if train.precision != "auto":
        precision = train.precision
    else:
        precision = natural_precision(hardware)
    if train.token_budget == "auto":
        budget = train.token_budget_on_cpu if hardware.device == "cpu" else None
    else:
        budget = train.token_budget
    return Resolved(precision=precision, token_budget=budget)


def natural_precision(hardware: HardwareProfile) -> Precision:
    """The one that every device here is fast in."""
    if hardware.device == "cpu":
        return "float32"
    return "bfloat16" if _all_know_bfloat16(hardware) else "float16"


def precision_note(precision: Precision, hardware: HardwareProfile) -> str | None:
    """A word on a precision that this device is slow in; it is obeyed all the same."""
    if hardware.device == "cpu" and precision != "float32":
        return (
            f"train.precision={precision} is obeyed, but a CPU is about 30 times slower in it than in float32; "
            "auto would choose float32"
        )
    if hardware.device == "cuda" and precision == "bfloat16" and not _all_know_bfloat16(hardware):
        return (
            "train.precision=bfloat16 is obeyed, but a GPU here is of compute capability below 8.0 and has no units "
            "for it; auto would choose float16"
        )
    return None


def _all_know_bfloat16(hardware: HardwareProfile) -> bool:
    return all(gpu.compute_capability >= BFLOAT16_CAPABILITY for gpu in hardware.gpus)


def read_config(path: Path) -> dict[str, object]:
    """The base model's config.json.

    Raises:
        UserError: missing, or no JSON object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path} is missing, and the plan is made from it; run prepare_data first") from None
    return parse_config(text, str(path))


def parse_config(text: str, path: str) -> dict[str, object]:
    """A config.json's text; `path` is where it came from.

    Raises:
        UserError: it is no JSON object.
    """
    try:
        config = json.loads(text)
    except ValueError as error:
        raise UserError(
            f"{path} is not JSON ({error}); mend the model's config or delete it and prepare again"
        ) from None
    if not isinstance(config, dict):
        raise UserError(f"{path} holds {type(config).__name__}, not a model's keys; mend the model's config")
    return config


def main() -> None:
    def run(params: Params, paths: Paths) -> None:
        select_strategy(params, paths)

    stage_main("select_strategy", run)


if __name__ == "__main__":
    main()
