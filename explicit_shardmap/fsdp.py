"""Fully sharded data parallelism by hand: parameters, gradients and optimizer state are split, and gathered to be used.

Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models": stage 3, and stage 1 in
`update`. A parameter is split over `fsdp` along its dimension of the model's width, whatever its place.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from shared.model.state import TrainState, next_state
from shared.model.transformer import unchanged
from shared.placement.layout import Layout
from shared.placement.specs import sharded_axes, sharded_dimension
from shared.twin import Plan


def gather(layout: Layout, specs: Any) -> Callable[[Any], Any]:
    """A seam: puts parameters together that are split over `fsdp`. Those of a block are freed when the block is done.

    The transpose of a gather is a `psum_scatter`: gradients arrive summed over the devices, and each device is left
    with those of its piece. Under rematerialisation the backward pass gathers again, and nothing whole is kept.
    """
    if "fsdp" not in layout.mesh.shape:
        return unchanged

    def whole(leaf: Array, spec: P) -> Array:
        if "fsdp" not in (entries := tuple(spec)):
            return leaf
        return lax.all_gather(leaf, "fsdp", axis=entries.index("fsdp"), tiled=True)

    return lambda pieces: jax.tree.map(whole, pieces, specs)


def stream(layout: Layout) -> Callable[[Array], Array]:
    """A seam: nothing to do, since each device has activations of its own rows and no others."""
    return unchanged


def norm(plan: Plan, gradients: optax.Updates) -> Array:
    """The gradients' global norm: squares are summed over exactly the axes on which a leaf is split.

    (`optax.clip_by_global_norm` would see this device's pieces only, and each device would clip by another norm.)
    """
    squares: dict[tuple[str, ...], Any] = {}
    specs = jax.tree.leaves(plan.layout.state.params)
    for leaf, spec in zip(jax.tree.leaves(gradients), specs, strict=True):
        axes = tuple(sorted(sharded_axes(spec)))
        squares[axes] = squares.get(axes, 0) + jnp.sum(jnp.square(leaf))
    return jnp.sqrt(sum(lax.psum(total, axes) if axes else total for axes, total in squares.items()))


def update(plan: Plan, state: TrainState, gradients: optax.Updates) -> TrainState:
    """The next state. A device updates what it has of the optimizer state, and gathers what others have updated."""
    layout = plan.layout
    if not layout.strategy.shard_optimizer:
        return next_state(plan.config, state, gradients)

    def mine(leaf: Array, dimension: int) -> Array:
        if dimension < 0:
            return leaf
        size = leaf.shape[dimension] // lax.axis_size("data")
        return lax.dynamic_slice_in_dim(leaf, lax.axis_index("data") * size, size, dimension)

    def whole(leaf: Array, dimension: int) -> Array:
        if dimension < 0:
            return leaf
        return lax.all_gather(leaf, "data", axis=dimension, tiled=True, to="invarying")  # the same on every device

    split = jax.tree.map(sharded_dimension, layout.state.params, layout.updated)
    pieces = jax.tree.map(mine, state.params, split)
    state = next_state(plan.config, replace(state, params=pieces), jax.tree.map(mine, gradients, split))
    return replace(state, params=jax.tree.map(whole, state.params, split))
