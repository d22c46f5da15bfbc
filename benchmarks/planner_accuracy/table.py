"""The published table: a CSV file -> rows, checked, and the cases that can be asked."""

from __future__ import annotations

import csv
import math
from collections import Counter
from pathlib import Path

from benchmarks.planner_accuracy.measured import Row
from benchmarks.planner_accuracy.rows import Case, Skip, case_of
from tasks.errors import UserError

DATA = Path(__file__).parents[1] / "data" / "measured_runs.csv"
# Without these columns no row can be asked; any other that is missing counts as empty in every row.
REQUIRED = (
    *("file", "framework", "model", "hidden", "layers", "seq_len", "num_gpus", "gpu_type"),
    *("dp", "precision", "method", "sharding", "status"),
)
WHOLE = (
    *("hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "seq_len", "micro_batch", "grad_accum"),
    *("global_batch", "num_gpus", "nodes", "dp", "tp", "pp", "cp", "ep", "vpp", "lora_rank"),
)
POSITIVE = (
    *("params_b", "gpu_mem_gb", "iter_time_s", "tokens_per_s_per_gpu", "samples_per_s", "tflops_per_gpu"),
    "mem_per_gpu",
)
TEXT = (
    *("offload", "lora_targets", "grad_dtype", "optimizer", "act_ckpt", "attn_impl", "compile"),
    *("mem_unit", "mem_kind", "notes", "tied_emb"),
)


def read_rows(path: Path) -> list[Row]:
    """All rows of a CSV file with the published table's columns; columns that are not there are empty.

    Raises:
        UserError: the file is missing or no such table, or a number is none.
    """
    if not path.is_file():
        raise UserError(f"{path} is no file; give a CSV file with the columns of {DATA.name}")
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in REQUIRED if name not in (reader.fieldnames or ())]
            if missing:
                raise UserError(
                    f"{path} has no column {', '.join(missing)}; give a CSV file with the columns of {DATA.name}"
                )
            empty = dict.fromkeys((*WHOLE, *POSITIVE, *TEXT), "")
            rows = [
                {**empty, **{key: value or "" for key, value in row.items() if key is not None}}
                for row in reader
            ]
    except (UnicodeDecodeError, csv.Error) as problem:
        raise UserError(f"{path} is no CSV text ({problem}); save it as UTF-8 with commas") from None
    for line, row in enumerate(rows, start=2):
        _check(path, line, row)
    return rows


def _check(path: Path, line: int, row: Row) -> None:
    if row["tied_emb"] not in ("", "nan", "0", "1", "0.0", "1.0"):
        raise UserError(f"{path}, row {line}: tied_emb is {row['tied_emb']!r} but must be 0 or 1, or empty")
    for key in (*WHOLE, *POSITIVE):
        text = row[key]
        if text in ("", "nan"):
            continue
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        rule = "a whole number from 1 on" if key in WHOLE else "a number above 0"
        if not (0 < value < math.inf) or (key in WHOLE and value != int(value)):
            raise UserError(
                f"{path}, row {line}: {key} is {text!r} but must be {rule}; mend it or leave it empty"
            )


def cases_of(rows: list[Row]) -> tuple[list[Case], Counter[str]]:
    """All rows that can be asked, and the reasons of the others with their counts."""
    cases, skipped = [], Counter[str]()
    for row in rows:
        try:
            cases.append(case_of(row))
        except Skip as reason:
            skipped[str(reason)] += 1
    return cases, skipped
