"""Data parallelism by placement: the batch is split over `data`, parameters and optimizer state are on every device.

The strategy table (shared/placement.py) already says so; what is left to say here is where the gradients live.
"""

from typing import Any

from jax import lax

from shared.placement import Layout


def average_gradients(layout: Layout, gradients: Any) -> Any:
    """Ask for the gradients where the parameters are: whole, on every device.

    They are already the gradients of the global mean loss, since here the loss is written over the global batch. But
    each device has computed the share of its own rows, and so the compiler has to insert one all-reduce.
    """
    return lax.with_sharding_constraint(gradients, layout.shardings(layout.state.params))
