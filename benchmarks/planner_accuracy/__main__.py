"""Scores the planner on published runs: predicted against measured memory and time.

Usage: python -m benchmarks.planner_accuracy [--csv FILE] [--held-out] [--json] [--record]
FILE is one row a run, with model shapes, layout and what was measured (benchmarks/data/README.md says the columns).
The time constants were fitted on rows of benchmarks/data/measured_runs.csv, so only --held-out is blind there.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.planner_accuracy.baselines import baselines
from benchmarks.planner_accuracy.held_out import held_out
from benchmarks.planner_accuracy.score import answer, by_source, met, overall, regimes
from benchmarks.planner_accuracy.table import DATA, cases_of, read_rows
from benchmarks.planner_accuracy.text import as_text
from benchmarks.record import write
from tasks.errors import USER_ERROR_EXIT_CODE, UserError


def report(path: Path, blind: bool = False) -> dict[str, Any]:
    """All scores of a table; `blind` adds those of rows that were left out of the fit (about a minute).

    Raises:
        UserError: the file is no such table.
    """
    cases, reasons = cases_of(read_rows(path))
    skipped = sum(reasons.values())
    answers = [answer(case) for case in cases]
    scores = overall(answers, skipped)
    found: dict[str, Any] = {
        "overall": scores,
        "goals_met": met(scores),
        "sources": by_source(answers),
        "regimes": regimes(answers),
        "baselines": baselines(cases, skipped),
        "skipped": dict(reasons.most_common()),
    }
    if blind:
        found["held_out"] = held_out(path, cases, skipped)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--csv", type=Path, default=DATA)
    parser.add_argument(
        "--held-out", action="store_true", help="also leave out sources, models and random rows"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument(
        "--record", action="store_true", help="also write benchmarks/results/planner-accuracy.json"
    )
    options = parser.parse_args()
    try:
        found = report(options.csv, options.held_out)
    except UserError as problem:
        print(problem, file=sys.stderr)
        sys.exit(USER_ERROR_EXIT_CODE)
    if options.record:
        write("planner-accuracy", found)
    print(json.dumps(found, indent=2) if options.json else as_text(found))


if __name__ == "__main__":
    main()
