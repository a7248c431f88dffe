"""Fully sharded data parallelism by hand: parameters and optimizer state are sharded, and gathered to be used.

Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models", stage 3. A parameter is
sharded over `fsdp` along its dimension of size d_model.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from shared.model.transformer import unchanged
from shared.placement.layout import Layout


def gather_outer_params(layout: Layout) -> Callable[[Any], Any]:
    """A seam: gather the embeddings, the last norm and the output, as a pass through the model begins."""
    return gather(layout, layout.outer)


def gather_block_params(layout: Layout) -> Callable[[Any], Any]:
    """A seam: gather one block's parameters as the block begins; they are freed when it is done."""
    return gather(layout, layout.block)


def gather(layout: Layout, specs: Any) -> Callable[[Any], Any]:
    """All-gather the leaves that these specs shard over `fsdp`.

    The transpose of a gather is a `psum_scatter`: gradients arrive summed over the devices, and each device keeps its
    shard of the sums. Under rematerialisation the backward pass gathers again, and no gathered parameter is kept.
    """
    if "fsdp" not in layout.mesh.shape:
        return unchanged

    def gathered(leaf: Array, spec: P) -> Array:
        if "fsdp" not in (entries := tuple(spec)):
            return leaf
        return lax.all_gather(leaf, "fsdp", axis=entries.index("fsdp"), tiled=True)

    return lambda shards: jax.tree.map(gathered, shards, specs)
