"""ZeRO stage 1 by placement: parameters are replicated, and `data` shards the optimizer state.

Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models", section 5.1.
"""

import optax
from jax import lax

from shared.model.state import TrainState, next_state
from shared.twin import Plan


def update(plan: Plan, state: TrainState, gradients: optax.Updates) -> TrainState:
    """The next state. Gradients sharded like the optimizer state make XLA update shards, and gather new parameters."""
    gradients = lax.with_sharding_constraint(gradients, plan.layout.shardings(plan.layout.updated))
    return next_state(plan.config, state, gradients)
