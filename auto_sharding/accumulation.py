"""Gradient accumulation by placement: a batch that does not fit goes through the model in microbatches.

Sums over the global batch would be reduced in every turn of the loop. So in pure data parallelism each device's rows
have sums of their own (a dimension that is sharded over the devices, and costs none of them anything), which are added
up once, after the loop. Where parameters are sharded as well, the compiler decides.
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


def accumulate(plan: Plan, gradients_of: Callable[..., Any], params: Any, batch: Batch) -> Any:
    """Sums of loss and gradients over the microbatches, which go through the model one after the other.

    gradients_of: (params, batch) to (loss, gradients), both sums.
    """
    mesh, per_device_sums = plan.layout.mesh, set(plan.layout.mesh.shape) == {"data"}
    groups = plan.layout.strategy.batch_devices(mesh.shape)

    def to_microbatches(x: Array) -> Array:
        """Rows (B, ...) to (microbatches, devices, b, ...): every device has a part of each microbatch."""
        x = x.reshape(groups, plan.config.microbatches, -1, *x.shape[1:])
        return jnp.swapaxes(constrained(mesh, x, P(*plan.layout.batch.rows)), 0, 1)

    parts = jax.tree.map(to_microbatches, batch)
    if per_device_sums:
        gradients_of = jax.vmap(gradients_of, (None, 0), spmd_axis_name="data")
    else:
        parts = jax.tree.map(lambda x: x.reshape(x.shape[0], -1, *x.shape[3:]), parts)
    zeros = jax.tree.map(
        lambda total, spec: constrained(
            mesh, jnp.zeros(total.shape, total.dtype), P("data") if per_device_sums else spec
        ),
        jax.eval_shape(gradients_of, params, jax.tree.map(lambda x: x[0], parts)),
        (P(), plan.layout.state.params),
    )

    def accumulate_step(sums: Any, part: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, gradients_of(params, part)), None

    sums, _ = lax.scan(accumulate_step, zeros, parts)
    return jax.tree.map(lambda total: total.sum(axis=0), sums) if per_device_sums else sums
