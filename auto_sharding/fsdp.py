"""Fully sharded data parallelism by placement: parameters and optimizer state are sharded, and gradients follow them.

Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models", stage 3. A parameter is
sharded over `fsdp` along its dimension of size d_model.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec as P

from shared.model.transformer import unchanged
from shared.placement.layout import Layout, constrained
from twinstep.tree import leaf_name


def gather_outer_params(layout: Layout) -> Callable[[Any], Any]:
    """A seam: replicate the embedding tables; XLA gathers all other parameters by itself, where they are used.

    To look up rows of a table that is sharded across them, and then shard the rows, it would send the rows.
    """
    if "fsdp" not in layout.mesh.shape:
        return unchanged

    def replicated(path: Any, leaf: Array) -> Array:
        return constrained(layout.mesh, leaf, P()) if "embedding" in leaf_name(path) else leaf

    return lambda params: jax.tree_util.tree_map_with_path(replicated, params)


def gather_block_params(layout: Layout) -> Callable[[Any], Any]:
    """A seam: nothing to do, XLA gathers a block's parameters by itself as the block begins."""
    return unchanged
