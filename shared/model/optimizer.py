"""Learning-rate schedule, clipping and update rule, from optax."""

import jax
import jax.numpy as jnp
import optax
from jax import Array

from shared.config import Config
from twinstep.tree import leaf_name


def schedule(config: Config) -> optax.Schedule:
    """Step number (from 0) to learning rate: linear warm-up, then constant or cosine down to a tenth."""
    options = config.optimizer
    peak = options.learning_rate
    warm = optax.linear_schedule(peak / (options.warmup + 1), peak, options.warmup)  # the first step moves already
    if options.schedule == "constant":
        rest = optax.constant_schedule(peak)
    else:
        rest = optax.cosine_decay_schedule(peak, max(config.steps - options.warmup, 1), alpha=0.1)
    return optax.join_schedules([warm, rest], [options.warmup])


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """AdamW or SGD as configured. Clipping is apart, in `clip`: under some strategies the norm needs communication."""
    options = config.optimizer
    if options.optimizer == "sgd":
        return optax.sgd(schedule(config))
    return optax.adamw(schedule(config), b2=0.95, weight_decay=options.weight_decay, mask=is_kernel)


def is_kernel(params: optax.Params) -> optax.Params:
    """Tree of booleans: True for weight matrices, which decay. Told by name, since stacked biases are matrices too."""
    return jax.tree_util.tree_map_with_path(lambda path, _: leaf_name(path).endswith("kernel"), params)


def clip(gradients: optax.Updates, norm: Array, limit: float) -> optax.Updates:
    """Gradients scaled down to the global norm `limit` where `norm`, their global norm, exceeds it; 0 is no limit.

    Pascanu et al. 2013, "On the difficulty of training recurrent neural networks", algorithm 1.
    """
    if limit == 0:
        return gradients
    scale = jnp.where(norm > limit, limit / norm, 1)
    return jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), gradients)
