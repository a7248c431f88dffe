"""Random keys of one type. JAX's default may be `rbg`, usual on TPUs, whose numbers depend on the sharding."""

import jax
from jax import Array

KEY_TYPE = "threefry2x32"


def random_key(seed: int | Array) -> Array:
    """Return a typed key for a seed, from 0 to 2**32 - 1."""
    return jax.random.key(seed, impl=KEY_TYPE)
