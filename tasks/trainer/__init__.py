"""Executes a Plan: worker, loop, engines, checkpoints."""

import logging
import os
from pathlib import Path

# PEFT imports bitsandbytes, which warns on some CPUs that a faster kernel for single tokens is not there. None is used.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
# accelerate imports DeepSpeed whenever a model is saved, and that warns where it finds no GPU and was not told so. The
# engine deepspeed says its plan's device itself.
if not Path("/dev/nvidiactl").exists() and not Path("/dev/dxg").exists():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
