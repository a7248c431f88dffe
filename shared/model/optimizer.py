"""Learning-rate schedule, clipping and update rule, from optax."""

import jax
import jax.numpy as jnp
import optax
from jax import Array

from shared.config import Config
from twinstep.tree import leaf_name


def schedule(config: Config) -> optax.Schedule:
    """Map a step number (from 0) to a learning rate: linear warm-up, then constant or cosine decay to a tenth."""
    options = config.optimizer
    peak = options.learning_rate
    first = peak / (options.warmup + 1)  # not 0: the first step moves already
    if options.schedule == "constant":
        return optax.warmup_constant_schedule(first, peak, options.warmup)
    end = max(config.steps, options.warmup + 1)  # a run that ends during its warm-up never decays
    return optax.warmup_cosine_decay_schedule(first, peak, options.warmup, end, end_value=0.1 * peak)


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """Return AdamW or SGD as configured. `clip` is separate: under some strategies the norm needs communication."""
    options = config.optimizer
    if options.optimizer == "sgd":
        return optax.sgd(schedule(config))
    return optax.adamw(schedule(config), b2=0.95, weight_decay=options.weight_decay, mask=is_kernel)


def is_kernel(params: optax.Params) -> optax.Params:
    """Return a tree of booleans: True for weight matrices, which decay; by name, as stacked biases are matrices."""
    return jax.tree_util.tree_map_with_path(lambda path, _: leaf_name(path).endswith("kernel"), params)


def clip(gradients: optax.Updates, norm: Array, limit: float) -> optax.Updates:
    """Scale gradients down to the global norm `limit` if `norm`, their global norm, exceeds it; 0 is no limit.

    Pascanu et al. 2013, "On the difficulty of training recurrent neural networks", algorithm 1.
    """
    if limit == 0:
        return gradients
    scale = jnp.where(norm > limit, limit / norm, 1)
    return jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), gradients)
