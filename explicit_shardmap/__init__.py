"""The training step whose every collective is written by hand, under `shard_map`.

Its mesh axes are what JAX calls *manual* ones. (JAX's *explicit* axes are another thing: shardings in types.)
"""

import sys

from jax.sharding import Mesh

from explicit_shardmap import context_parallel, decode, fsdp, step, tensor_parallel
from shared.build import assemble
from shared.config import Config
from shared.twin import Twin

__all__ = ["build", "context_parallel", "decode", "fsdp", "step", "tensor_parallel"]


def build(config: Config, mesh: Mesh) -> Twin:
    """The step of this configuration on this mesh. Raises ValueError for sizes that do not divide."""
    return assemble(sys.modules[__name__], config, mesh)
