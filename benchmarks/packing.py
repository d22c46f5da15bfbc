"""Packs beside TRL's best-fit-decreasing on the same rows: fill and seconds; and the padding that an order spares.

TRL is taken as it comes (`pack_dataset`, which packs every 1,000 rows by themselves) and told to pack all rows at once;
it moves the tokens while it packs, where Elastane writes which rows are together. Both hold the same tokens in memory.

Usage: python -m benchmarks.packing [--trl trl-1.16.0-py3-none-any.whl]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.record import write
from tasks.data.order import SampleOrder, deal
from tasks.data.packing import best_fit, write_packs

CASES = ((2_000, 2048), (200_000, 2048), (200_000, 8192), (1_000_000, 4096))
TIMES = 3
BATCH = 64


def long_tailed(rows: int, longest: int) -> NDArray[np.int64]:
    """Log-normal lengths as of instructions and answers: median 148, mean 244."""
    drawn = np.random.RandomState(rows).lognormal(5, 1, rows)
    return drawn.clip(8, longest).astype(np.int64)


def best_of(work: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds of the fastest of a few runs, what it gave)."""
    found, result = [], None
    for _ in range(TIMES):
        begin = time.perf_counter()
        result = work()
        found.append(time.perf_counter() - begin)
    return min(found), result


def ours(lengths: NDArray[np.int64], room: int) -> dict[str, Any]:
    decided, _ = best_of(lambda: best_fit(lengths, room))
    with tempfile.TemporaryDirectory() as folder:
        written, counts = best_of(lambda: write_packs(Path(folder), lengths, room))
    return {"packs": counts.packs, "seconds": round(written, 4), "seconds_to_decide": round(decided, 4)}


def trls(lengths: NDArray[np.int64], room: int, at_once: bool) -> dict[str, Any]:
    import datasets
    import pyarrow as pa

    pack = importlib.import_module("trl.data_utils").pack_dataset
    datasets.disable_progress_bars()
    datasets.disable_caching()
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.zeros(offsets[-1], np.int32)))
    rows = datasets.Dataset(pa.table({"input_ids": ids}))
    options = {"batch_size": len(lengths)} if at_once else {}
    seconds, packed = best_of(lambda: pack(rows, room, "bfd", map_kwargs=options))
    return {"packs": len(packed), "seconds": round(seconds, 4)}


def with_fill(found: dict[str, Any], tokens: int, room: int) -> dict[str, Any]:
    """Of the room of all packs, and of what the total length allows."""
    fewest = -(-tokens // room)
    return found | {
        "fill": round(tokens / (found["packs"] * room), 5),
        "of_what_is_possible": round(fewest / found["packs"], 5),
    }


def padding(lengths: NDArray[np.int64], by_length: bool, micro: int) -> float:
    """The share of an epoch's computed tokens that are padding, on one rank with micro-batches of so many rows."""
    order = SampleOrder(len(lengths), BATCH, 0, lengths if by_length else None)
    filled = 0
    for step in range(order.steps_per_epoch):
        for batch in deal(order.samples(step).tolist(), lengths, micro, 1, 0):
            filled += len(batch.rows) * int(lengths[list(batch.rows)].max())
    return round(1 - int(lengths.sum()) / filled, 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl", type=Path, help="a wheel; without it an installed TRL, or none")
    options = parser.parse_args()
    if options.trl is not None:
        sys.path.insert(0, str(options.trl.resolve()))
    peer = importlib.util.find_spec("trl") is not None
    cases = []
    for rows, room in CASES:
        lengths = long_tailed(rows, room)
        tokens = int(lengths.sum())
        found = {"elastane": ours(lengths, room)}
        if peer:
            found["trl"] = trls(lengths, room, at_once=False)
            found["trl_at_once"] = trls(lengths, room, at_once=True)
        told = {name: with_fill(value, tokens, room) for name, value in found.items()}
        cases.append({"rows": rows, "max_length": room, "tokens": tokens, **told})
        print(cases[-1])
    lengths = long_tailed(20_000, 4096)
    orders = {
        f"micro_batch_{micro}": {
            name: padding(lengths, name == "by_length", micro) for name in ("shuffled", "by_length")
        }
        for micro in (2, 8, 32)
    }
    figures: dict[str, Any] = {
        "packing_fill": min(
            case["elastane"]["of_what_is_possible"] for case in cases if case["rows"] > 2_000
        ),
        "cases": cases,
        "padding_share": {"global_batch": BATCH, "rows": len(lengths), **orders},
    }
    if peer:
        seconds = [(case["trl_at_once"]["seconds"], case["elastane"]["seconds"]) for case in cases]
        figures["trl"] = importlib.metadata.version("trl")
        figures["speed_to_trl"] = round(min(theirs / own for theirs, own in seconds), 2)
    print(write("packing", figures))


if __name__ == "__main__":
    main()
