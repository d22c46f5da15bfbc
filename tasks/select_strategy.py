"""Stage select_strategy: hardware, data and model config -> plan.json."""

from __future__ import annotations

import json
from pathlib import Path

from tasks.contracts import DataManifest, HardwareProfile, PlanReport, Precision, Resolved
from tasks.errors import UserError
from tasks.params import Params, TrainParams
from tasks.paths import Paths
from tasks.planner.explain import table, why
from tasks.planner.model_spec import model_spec
from tasks.planner.search import search
from tasks.stage import say, stage_main

BFLOAT16_CAPABILITY = (8, 0)


def select_strategy(params: Params, paths: Paths) -> PlanReport:
    """Costs every legal plan, writes plan.json with the best and says why on stderr.

    Raises:
        UserError: an input is missing, a pin breaks a rule, or nothing fits.
    """
    hardware = HardwareProfile.read(paths.hardware)
    manifest = DataManifest.read(paths.manifest)
    spec = model_spec(read_config(paths.base / "config.json"))
    resolved = resolve(params.train, hardware)
    note = precision_note(resolved.precision, hardware)
    if note:
        say(note)
    candidates = search(spec, hardware, params.train, params.select_strategy, manifest, resolved)
    fitting = [candidate for candidate in candidates if candidate.rejected is None]
    report = PlanReport(
        chosen=fitting[0],
        why=why(candidates, hardware),
        runners_up=tuple(fitting[1:]),
        rejected=tuple(candidate for candidate in candidates if candidate.rejected is not None),
        resolved=resolved,
        model=spec,
    )
    report.write(paths.plan)
    say(table(report))
    return report


def resolve(train: TrainParams, hardware: HardwareProfile) -> Resolved:
    """What `auto` means on this machine: the precision every device is fast in, and the token budget."""
    precision: Precision
    if train.precision != "auto":
        precision = train.precision
    elif hardware.device == "cpu":
        precision = "float32"
    else:
        precision = "bfloat16" if _all_know_bfloat16(hardware) else "float16"
    if train.token_budget == "auto":
        budget = train.token_budget_on_cpu if hardware.device == "cpu" else None
    else:
        budget = train.token_budget
    return Resolved(precision=precision, token_budget=budget)


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
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing, and the plan is made from it; run prepare_data first") from None
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
