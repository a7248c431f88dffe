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

from shared.model import unchanged
from shared.placement import Layout, split_axes
from shared.state import TrainState, next_state
from shared.twin import Plan


def outer(layout: Layout) -> Callable[[Any], Any]:
    """A seam: gathers the parameters outside of the blocks as a pass through the model begins."""
    if "fsdp" not in layout.mesh.shape:
        return unchanged
    specs = {**layout.state.params}
    del specs["blocks"]
    return lambda params: type(params)({**params, **gather({name: params[name] for name in specs}, specs)})


def layers(layout: Layout) -> Callable[[Any], Any]:
    """A seam: gathers one block's parameters as the scan reads them; they are freed when the block is done.

    The transpose of a gather is a `psum_scatter`: gradients arrive summed over the devices, and each device is left
    with those of its piece. Under rematerialisation the backward pass gathers again, and nothing whole is kept.
    """
    if "fsdp" not in layout.mesh.shape:
        return unchanged
    specs = jax.tree.map(lambda spec: P(*spec[1:]), layout.state.params["blocks"])  # without the leading L
    return lambda parameters: gather(parameters, specs)


def gather(pieces: Any, specs: Any) -> Any:
    """Put the leaves together that are split over `fsdp`."""

    def whole(leaf: Array, spec: P) -> Array:
        if "fsdp" not in (entries := tuple(spec)):
            return leaf
        return lax.all_gather(leaf, "fsdp", axis=entries.index("fsdp"), tiled=True)

    return jax.tree.map(whole, pieces, specs)


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
        axes = tuple(sorted(split_axes(spec)))
        squares[axes] = squares.get(axes, 0) + jnp.sum(jnp.square(leaf))
    return jnp.sqrt(sum(lax.psum(total, axes) if axes else total for axes, total in squares.items()))


def update(plan: Plan, state: TrainState, gradients: optax.Updates) -> TrainState:
    """The next state. A device updates what it has of the optimizer state, and gathers what others have updated."""
    layout = plan.layout
    if not layout.strategy.zero:
        return next_state(plan.config, state, gradients)

    def mine(leaf: Array, spec: P, split: P) -> Array:
        for dimension, entry in enumerate(split):
            if entry and entry != (spec[dimension] if dimension < len(spec) else None):
                size = leaf.shape[dimension] // lax.axis_size("data")
                return lax.dynamic_slice_in_dim(leaf, lax.axis_index("data") * size, size, dimension)
        return leaf

    def whole(leaf: Array, spec: P, split: P) -> Array:
        for dimension, entry in enumerate(split):
            if entry and entry != (spec[dimension] if dimension < len(spec) else None):
                return lax.all_gather(leaf, "data", axis=dimension, tiled=True, to="invarying")
        return leaf

    specs = layout.state.params, layout.updated
    pieces = jax.tree.map(mine, state.params, *specs)
    state = next_state(plan.config, replace(state, params=pieces), jax.tree.map(mine, gradients, *specs))
    return replace(state, params=jax.tree.map(whole, state.params, *specs))
