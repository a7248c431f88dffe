"""The training step whose communication XLA inserts: arrays are placed, and an ordinary step is jitted."""

import sys

from jax.sharding import Mesh

from auto_sharding import context_parallel, decode, fsdp, step, tensor_parallel
from shared.build import assemble
from shared.config import Config
from shared.twin import Twin

__all__ = ["build", "context_parallel", "decode", "fsdp", "step", "tensor_parallel"]


def build(config: Config, mesh: Mesh) -> Twin:
    """The step of this configuration on this mesh. Raises ValueError for sizes that do not divide."""
    return assemble(sys.modules[__name__], config, mesh)
