"""The training step whose communication XLA inserts: arrays are placed, and an ordinary step is jitted."""

from auto_sharding.step import build

__all__ = ["build"]
