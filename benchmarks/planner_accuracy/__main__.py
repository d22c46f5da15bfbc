"""Scores the planner on published runs.

Usage: python -m benchmarks.planner_accuracy --csv FILE [--json]
FILE has the columns of the published table: one row a run, with model shapes, layout and what was measured.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import Counter
from pathlib import Path

from benchmarks.planner_accuracy.rows import Case, Skip, case_of
from benchmarks.planner_accuracy.score import Answer, answer, overall, regimes


def read_cases(path: Path) -> tuple[list[Case], Counter[str]]:
    """All rows that can be asked, and the reasons of the others with their counts."""
    cases, skipped = [], Counter[str]()
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            try:
                cases.append(case_of({key: value or "" for key, value in row.items()}))
            except Skip as reason:
                skipped[str(reason)] += 1
    return cases, skipped


def report(path: Path) -> tuple[dict[str, object], list[Answer]]:
    cases, skipped = read_cases(path)
    answers = [answer(case) for case in cases]
    return {
        "overall": overall(answers, sum(skipped.values())),
        "regimes": regimes(answers),
        "skipped": dict(skipped.most_common()),
    }, answers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args()
    if not options.csv.is_file():
        sys.exit(f"{options.csv} is no file; give a CSV with the columns of the published table")
    result, _ = report(options.csv)
    if options.json:
        print(json.dumps(result, indent=2))
        return
    for name, value in result["overall"].items():  # type: ignore[attr-defined]
        print(f"{name:22} {value}")
    for row in result["regimes"]:  # type: ignore[attr-defined]
        print("  ".join(f"{value}" for value in row.values()))
    for reason, count in result["skipped"].items():  # type: ignore[attr-defined]
        print(f"skipped {count:4}: {reason}")


if __name__ == "__main__":
    main()
