"""Checkpoints in layouts that only their own code can run, converted to a class of transformers without running it."""
