"""kill -9 of worker, train stage and flow at drawn moments; weights after `dvc repro` against an uninterrupted run.

Three in four fall after a step drawn uniformly over the run's steps, the others before its first.

Usage: python -m benchmarks.kill9 [--kills 10] [--seed 0]
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from pathlib import Path

from benchmarks.record import write
from tests.pipeline.kill import VICTIMS, as_rows, kill_once
from tests.pipeline.workspace import make_workspace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    draw = random.Random(options.seed)
    kills = []
    with tempfile.TemporaryDirectory() as temporary:
        for ranks in (1, 2):
            workspace = make_workspace(
                Path(temporary) / f"ranks{ranks}",
                **{"select_strategy.data_parallel_degree": ranks, "train.num_train_epochs": 12},
            )
            workspace.must("dvc", "repro", "-q")
            reference = workspace.weights()
            for number in range(options.kills // 2):
                victim = list(VICTIMS)[(number + ranks) % len(VICTIMS)]
                kills.append(kill_once(workspace, victim, ranks, draw, reference))
                print(kills[-1], flush=True)
    write(
        "kill9",
        {"seed": options.seed, "kills": as_rows(kills), "all_equal": all(kill.equal for kill in kills)},
    )


if __name__ == "__main__":
    main()
