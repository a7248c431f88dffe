"""Fully sharded data parallelism by placement: parameters and optimizer state live split, gradients follow them.

Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models": stage 3, and stage 1 in
`update`. A parameter is split over `fsdp` along its dimension of the model's width, whatever its place.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from shared.model.state import TrainState, next_state
from shared.model.transformer import unchanged
from shared.placement.layout import Layout, constrained
from shared.twin import Plan
from twinstep.tree import leaf_name


def gather(layout: Layout, specs: Any) -> Callable[[Any], Any]:
    """A seam: asks for whole tables of embeddings; all other parameters the compiler gathers unasked.

    To look rows up in a table that is split across them, and then split the rows, it would send the rows.
    """
    if "fsdp" not in layout.mesh.shape:
        return unchanged

    def whole(path: Any, leaf: Array) -> Array:
        return constrained(layout.mesh, leaf, P()) if "embedding" in leaf_name(path) else leaf

    return lambda pieces: jax.tree_util.tree_map_with_path(whole, pieces)


def stream(layout: Layout) -> Callable[[Array], Array]:
    """A seam: the residual stream is split as the batch is.

    Without this the compiler may split activations by the layout of the parameters, and hold the whole batch.
    """
    if set(layout.mesh.shape) <= {"data"}:
        return unchanged
    return lambda x_BTD: constrained(layout.mesh, x_BTD, layout.stream)


def norm(plan: Plan, gradients: optax.Updates) -> Array:
    """The gradients' global norm."""
    return optax.tree.norm(gradients)


def update(plan: Plan, state: TrainState, gradients: optax.Updates) -> TrainState:
    """The next state. Where the optimizer state is split and the parameters are not, its pieces are updated."""
    if plan.layout.strategy.shard_optimizer:
        gradients = lax.with_sharding_constraint(gradients, plan.layout.shardings(plan.layout.updated))
    return next_state(plan.config, state, gradients)
