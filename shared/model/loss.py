"""Cross-entropy in nats, summed over the counted tokens."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array


def summed_loss(logits_BTV: Array, targets_BT: Array, weights_BT: Array) -> Array:
    """Sum over tokens of weight times cross-entropy, a scalar in nats, in float32 or wider.

    The mean is this sum over the sum of the weights. Each twin divides for itself, because on several devices the
    mean of the devices' means is not the mean when they hold different numbers of counted tokens.
    """
    logits_BTV = logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))
    losses_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT)
    return jnp.sum(losses_BT * weights_BT.astype(losses_BT.dtype))


def counted_tokens(weights_BT: Array, dtype: str) -> Array:
    """Sum of the weights: the number of tokens that count, a scalar in the loss's type for computation in `dtype`."""
    return jnp.sum(weights_BT, dtype=jnp.promote_types(dtype, jnp.float32))


def sums_to_means(sums: Any, count: Array) -> Any:
    """A tree of sums over tokens as means, each in the type it has."""
    return jax.tree.map(lambda total: (total / count).astype(total.dtype), sums)
