"""The training step whose every collective is written by hand, under `shard_map`.

Its mesh axes are what JAX calls *manual* ones. (JAX's *explicit* axes are another thing: shardings in types.)
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from explicit_shardmap import context_parallel, decode, fsdp, step, tensor_parallel
    from shared.config import Config
    from shared.twin import Twin

__all__ = ["build", "context_parallel", "decode", "fsdp", "step", "tensor_parallel"]

# JAX is imported on first use, so that __main__ can first provide for Ctrl-C and for a setting that JAX refuses.


def build(config: Config, mesh: Mesh) -> Twin:
    """The step of this configuration on this mesh. Raises ValueError for sizes that do not divide."""
    from shared.build import assemble

    return assemble(sys.modules[__name__], config, mesh)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
