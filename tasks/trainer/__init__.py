"""Executes a Plan: worker, loop, engines, checkpoints."""

import logging

# PEFT imports bitsandbytes, which warns on some CPUs that a faster kernel for single tokens is not there. None is used.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
