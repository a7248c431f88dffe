"""Gradient accumulation by hand: a batch that does not fit goes through the model in parts.

Over the axes on which parameters are whole nothing is reduced in the loop: that is done once, of the sums. The
parameters that `fsdp` splits are gathered for each part, and their gradients reduced for each.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shared.data.batches import Batch, microbatches
from shared.placement.specs import sharded_axes
from shared.twin import Plan


def accumulate(plan: Plan, gradients: Callable[..., Any], params: Any, batch: Batch) -> Any:
    """Sums of loss and gradients over the microbatches, which go through the model one after the other.

    gradients: (params, batch) to (loss, gradients), both local sums.
    """
    if plan.config.microbatches == 1:
        return gradients(params, batch)
    layout, parts = plan.layout, microbatches(batch, plan.config.microbatches)
    axes = jax.tree.map(lambda spec, over: (*sharded_axes(spec), *over), layout.state.params, layout.reduce_axes)
    loss = jnp.zeros((), jnp.promote_types(plan.config.model.dtype, jnp.float32))
    nothing = jax.tree.map(
        lambda leaf, over: lax.pcast(jnp.zeros(leaf.shape, leaf.dtype), over, to="varying"),  # as what is added to it
        (loss, params),
        (layout.batch_axes, axes),
    )

    def add(sums: Any, part: Batch) -> tuple[Any, None]:
        # Barriers keep gathers in the loop: before it, gathered parameters would be kept for all of its turns. (Leaf by
        # leaf, since in JAX 0.10 all that comes out of one barrier varies over the axes of all that goes in.)
        here = jax.tree.map(lambda leaf: lax.optimization_barrier((leaf, part.rows))[0], params)
        return jax.tree.map(jnp.add, sums, gradients(here, part)), None

    sums, _ = lax.scan(add, nothing, parts)
    return sums
