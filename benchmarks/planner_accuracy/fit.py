"""Fits the time constants of `tasks.planner.calibration` to published runs, a GPU generation at a time.

Usage: python -m benchmarks.planner_accuracy.fit [--csv FILE]
It prints both generations' constants; those in tasks/planner/calibration.py are these, rounded. Scoring with
--held-out fits them anew on each part of the rows.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from benchmarks.planner_accuracy.rows import Case
from benchmarks.planner_accuracy.table import DATA, cases_of, read_rows
from tasks.planner.calibration import Calibration
from tasks.planner.time import seconds

GENERATIONS = ("A100", "H100")  # the others have too few rows, and take the nearest generation's constants
ROWS_A_REGIME = 60  # so that a source of a thousand rows does not decide alone
TYPICAL_ERROR = 0.05  # beyond this relative error a row counts less and less (Cauchy loss)
STEPS = 30

# Start, least and most of each constant: what hardware of any make can be, not what the rows say.
LIMITS = {
    "matmul": (0.8, 0.5, 0.95),
    "rows": (400, 0, 3000),
    "width": (200, 0, 3000),
    "attention": (0.35, 0.15, 0.8),
    "bandwidth": (0.7, 0.55, 0.95),
    "link": (0.65, 0.3, 1),
    "network": (0.6, 0.3, 0.95),
    "latency": (10e-6, 4e-6, 100e-6),
    "network_latency": (40e-6, 10e-6, 250e-6),
    "contention": (0.1, 0, 0.3),
    "step": (0.01, 0, 0.03),
    "half_size": (4e6, 1e6, 40e6),
}
NAMES = tuple(field.name for field in fields(Calibration))


def generation(case: Case) -> str | None:
    return next((name for name in GENERATIONS if name in case.gpu), None)


def chosen(cases: Sequence[Case], name: str, seed: int = 0) -> list[tuple[Case, float]]:
    """Timed rows of one generation, at most ROWS_A_REGIME a regime, with weights: n rows weigh n^(3/4) in all."""
    groups: dict[tuple[str, str, str], list[Case]] = defaultdict(list)
    for case in cases:
        if case.seconds and generation(case) == name:
            groups[case.regime].append(case)
    order = np.random.default_rng(seed)
    picked = []
    for _, group in sorted(groups.items()):
        some = [group[index] for index in order.permutation(len(group))[:ROWS_A_REGIME]]
        picked += [(case, len(some) ** -0.25) for case in some]
    return picked


def predicted(cases: Sequence[Case], constants: Calibration) -> np.ndarray:
    """Seconds a step of each case with these constants."""
    machines = {}
    totals = []
    for case in cases:
        key = id(case.cost.machine)
        if key not in machines:
            machines[key] = replace(case.cost.machine, constants=constants)
        cost = case.cost
        totals.append(sum(seconds(cost.spec, case.plan, cost.work, machines[key], cost.software).values()))
    return np.array(totals)


def fit(cases: Sequence[Case], name: str) -> Calibration | None:
    """The constants that bring the logarithms of predicted over measured seconds nearest to 0; None without rows."""
    picked = chosen(cases, name)
    if not picked:
        return None
    rows = [case for case, _ in picked]
    weights = np.array([weight for _, weight in picked])
    measured = np.array([case.seconds for case in rows])
    start, low, high = (np.array([LIMITS[key][part] for key in NAMES]) for part in range(3))

    def constants(scaled: np.ndarray) -> Calibration:
        return Calibration(**dict(zip(NAMES, map(float, low + scaled * (high - low)), strict=True)))

    found = least_squares(
        lambda scaled: weights * np.log(predicted(rows, constants(scaled)) / measured),
        (start - low) / (high - low),
        bounds=(0, 1),
        loss="cauchy",
        f_scale=TYPICAL_ERROR,
        max_nfev=STEPS,
        diff_step=1e-3,
    )
    return constants(found.x)


def with_constants(case: Case, fitted: Mapping[str, Calibration]) -> Case:
    """The case on a machine with its generation's fitted constants."""
    constants = fitted.get(generation(case) or "")
    if constants is None:
        return case
    return replace(case, cost=replace(case.cost, machine=replace(case.cost.machine, constants=constants)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--csv", type=Path, default=DATA)
    cases, _ = cases_of(read_rows(parser.parse_args().csv))
    for name in GENERATIONS:
        found = fit(cases, name)
        used = len(chosen(cases, name))
        print(f"{name} on {used} rows")
        for key, value in asdict(found).items() if found else ():
            print(f"    {key}={value:.3g},")


if __name__ == "__main__":
    main()
