"""A trial whose compiled kernels may keep float32 where the layers as written round to half precision.

What rounding alike costs is the difference to `tasks.trainer.trial`, which this otherwise is.
"""

from __future__ import annotations

import sys

from tasks.trainer import compiling, trial

if __name__ == "__main__":
    compiling.INDUCTOR["emulate_precision_casts"] = False
    trial.main(sys.argv[1:])
