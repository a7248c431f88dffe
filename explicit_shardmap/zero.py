"""ZeRO stage 1 by hand: parameters are replicated, and `data` shards the optimizer state.

Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models", section 5.1.
"""

from dataclasses import replace

import jax
import optax
from jax import Array, lax

from shared.model.state import TrainState, next_state
from shared.placement.specs import sharded_dimension
from shared.twin import Plan


def update(plan: Plan, state: TrainState, gradients: optax.Updates) -> TrainState:
    """The next state. A device updates its own shard of the parameters, and gathers what the others have updated."""

    def local_slice(leaf: Array, dimension: int) -> Array:
        if dimension < 0:
            return leaf
        size = leaf.shape[dimension] // lax.axis_size("data")
        return lax.dynamic_slice_in_dim(leaf, lax.axis_index("data") * size, size, dimension)

    def gathered(leaf: Array, dimension: int) -> Array:
        if dimension < 0:
            return leaf
        return lax.all_gather(leaf, "data", axis=dimension, tiled=True, to="invarying")  # the same on every device

    dimensions = jax.tree.map(sharded_dimension, plan.layout.state.params, plan.layout.updated)
    local = replace(state, params=jax.tree.map(local_slice, state.params, dimensions))
    local = next_state(plan.config, local, jax.tree.map(local_slice, gradients, dimensions))
    return replace(local, params=jax.tree.map(gathered, local.params, dimensions))
