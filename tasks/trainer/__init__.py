"""Executes a Plan: worker, loop, engines, checkpoints."""
