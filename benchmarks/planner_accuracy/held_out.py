"""Scores rows that nothing was fitted on: a source, a model or a random part is left out, all else is fitted anew."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.planner_accuracy.fit import GENERATIONS, fit, generation, with_constants
from benchmarks.planner_accuracy.rows import Case, case_of
from benchmarks.planner_accuracy.score import Answer, answer, by_source, overall
from benchmarks.planner_accuracy.table import cases_of, read_rows

FOLDS = 5  # of models and of the random split

_cases: list[Case] = []


def held_out(path: Path, cases: Sequence[Case], skipped: int) -> dict[str, object]:
    """The keys of `overall` for three ways to leave rows out, each scored once, when it was left out.

    leave_one_source_out also forgets what was inferred of a trainer's habits from the source left out.
    leave_one_model_out leaves a fifth of the models out at a time, and random_split a fifth of the rows; habits stay.
    """
    sources = sorted({case.source for case in cases})
    source_of = [sources.index(case.source) for case in cases]
    ways = {
        "leave_one_source_out": source_of,
        "leave_one_model_out": _model_folds(cases),
        "random_split": list(np.random.default_rng(0).permutation(len(cases)) % FOLDS),
    }
    parts = [(way, fold) for way, folds in ways.items() for fold in sorted(set(folds))]
    jobs = [[index for index, here in enumerate(ways[way]) if here == fold] for way, fold in parts]
    workers = min(len(jobs), len(os.sched_getaffinity(0)))
    found: dict[str, list[Answer]] = defaultdict(list)
    with ProcessPoolExecutor(workers, initializer=_read, initargs=(path,)) as pool:
        for (way, _), job, fitted in zip(parts, jobs, pool.map(_fit_without, jobs), strict=True):
            for case in (cases[index] for index in job):
                asked = case_of(case.row, case.row["file"]) if way == "leave_one_source_out" else case
                found[way].append(answer(with_constants(asked, fitted)))
    return {
        way: {"overall": overall(answers, skipped), "sources": by_source(answers)}
        for way, answers in found.items()
    }


def _model_folds(cases: Sequence[Case]) -> list[int]:
    """A fold of each case: models with most rows are dealt first, each to the fold with fewest rows."""
    rows: dict[str, list[int]] = defaultdict(list)
    for index, case in enumerate(cases):
        rows[case.model].append(index)
    folds, sizes = [0] * len(cases), [0] * FOLDS
    for _, group in sorted(rows.items(), key=lambda pair: (-len(pair[1]), pair[0])):
        fold = sizes.index(min(sizes))
        sizes[fold] += len(group)
        for index in group:
            folds[index] = fold
    return folds


def _read(path: Path) -> None:
    _cases[:] = cases_of(read_rows(path))[0]


def _fit_without(left_out: list[int]) -> dict[str, object]:
    """Constants of each generation that has a row left out, fitted on the others."""
    gone = set(left_out)
    kept = [case for index, case in enumerate(_cases) if index not in gone]
    needed = {generation(_cases[index]) for index in left_out}
    fitted = {name: fit(kept, name) for name in GENERATIONS if name in needed}
    return {name: constants for name, constants in fitted.items() if constants is not None}
