"""Gradient accumulation by hand: a batch that does not fit goes through the model in microbatches.

Over the axes over which parameters are replicated nothing is reduced in the loop: their sums are, once, after it.
Parameters that `fsdp` shards are gathered for each microbatch, and their gradients reduced for each.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shared.data.batches import Batch, microbatches
from shared.placement.specs import sharded_axes
from shared.twin import Plan


def accumulate(plan: Plan, gradients_of: Callable[..., Any], params: Any, batch: Batch) -> Any:
    """Sums of loss and gradients over the microbatches, which go through the model one after the other.

    gradients_of: (params, batch) to (loss, gradients), both local sums.
    """
    layout, parts = plan.layout, microbatches(batch, plan.config.microbatches)
    axes = jax.tree.map(lambda spec, over: (*sharded_axes(spec), *over), layout.state.params, layout.reduce_axes)
    loss = jnp.zeros((), jnp.promote_types(plan.config.model.dtype, jnp.float32))
    zeros = jax.tree.map(  # same varying axes as the gradients added to them
        lambda leaf, over: lax.pcast(jnp.zeros(leaf.shape, leaf.dtype), over, to="varying"),
        (loss, params),
        (layout.batch_axes, axes),
    )

    def accumulate_step(sums: Any, part: Batch) -> tuple[Any, None]:
        # Barriers keep gathers in the loop: before it, gathered parameters would be kept for all of its turns. One
        # barrier per leaf: in JAX 0.10 every output of a barrier takes the union of its inputs' varying axes.
        local = jax.tree.map(lambda leaf: lax.optimization_barrier((leaf, part.rows))[0], params)
        return jax.tree.map(jnp.add, sums, gradients_of(local, part)), None

    sums, _ = lax.scan(accumulate_step, zeros, parts)
    return sums
