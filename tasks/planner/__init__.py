"""Predicts memory and speed of every legal Plan and chooses one. Pure: no torch, no files, no devices."""
