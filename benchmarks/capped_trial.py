"""A trial on GPUs of which only CAP_GIB may be used, as if they were smaller ones."""

from __future__ import annotations

import os
import sys

import torch

from tasks.trainer import trial

if __name__ == "__main__":
    local = int(os.environ["LOCAL_RANK"])
    whole = torch.cuda.get_device_properties(local).total_memory
    torch.cuda.set_per_process_memory_fraction(float(os.environ["CAP_GIB"]) * 2**30 / whole, local)
    trial.main(sys.argv[1:])
