"""The training step whose every collective is written by hand, under `shard_map` (JAX's *manual* axes)."""

from explicit_shardmap.step import build

__all__ = ["build"]
