"""Gradient accumulation by placement: a batch that does not fit goes through the model in parts.

Sums over the global batch would be reduced in every turn of the loop. So in pure data parallelism each device's rows
have sums of their own (a dimension that is split over the devices, and costs none of them anything), which are added up
once, after the loop. Where parameters are split as well, the compiler decides.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from shared.data.batches import Batch
from shared.placement.layout import constrained
from shared.twin import Plan


def accumulate(plan: Plan, gradients: Callable[..., Any], params: Any, batch: Batch) -> Any:
    """Sums of loss and gradients over the microbatches, which go through the model one after the other.

    gradients: (params, batch) to (loss, gradients), both sums.
    """
    if plan.config.microbatches == 1:
        return gradients(params, batch)
    mesh, apart = plan.layout.mesh, set(plan.layout.mesh.shape) == {"data"}
    groups = plan.layout.strategy.batch_devices(mesh.shape)

    def dealt(x: Array) -> Array:
        """Rows (B, ...) to (microbatches, devices, b, ...): every device has a part of each microbatch."""
        x = x.reshape(groups, plan.config.microbatches, -1, *x.shape[1:])
        return jnp.swapaxes(constrained(mesh, x, P(*plan.layout.batch.rows)), 0, 1)

    parts = jax.tree.map(dealt, batch)
    if apart:
        gradients = jax.vmap(gradients, (None, 0), spmd_axis_name="data")
    else:
        parts = jax.tree.map(lambda x: x.reshape(x.shape[0], -1, *x.shape[3:]), parts)
    specs = (P(), plan.layout.state.params)
    nothing = jax.tree.map(
        lambda total, spec: constrained(mesh, jnp.zeros(total.shape, total.dtype), P("data") if apart else spec),
        jax.eval_shape(gradients, params, jax.tree.map(lambda x: x[0], parts)),
        specs,
    )

    def add(sums: Any, part: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, gradients(params, part)), None

    sums, _ = lax.scan(add, nothing, parts)
    return jax.tree.map(lambda total: total.sum(axis=0), sums) if apart else sums
