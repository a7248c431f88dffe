"""How far apart two correct computations may be: the rule, from the type and the shapes. docs/proof.md explains it."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Work(NamedTuple):
    """How much rounding stands behind a gradient, estimated from shapes alone."""

    terms: int
    """Numbers summed on the way from the inputs: the tokens of the batch, and every contraction there and back."""
    roundings: int
    """Results stored on the way, each rounded once."""


def work_behind(state: Any, batch: Any) -> Work:
    """The work behind a step of (state, batch).

    An array of the state stands for one operation each way, whose contraction is no longer than the array's size
    over its last dimension; the largest array of the batch stands for the sum over tokens.
    """
    arrays = [np.shape(leaf) for leaf in jax.tree.leaves(state) if np.ndim(leaf)]
    tokens = max((math.prod(np.shape(leaf)) for leaf in jax.tree.leaves(batch)), default=1)
    return Work(tokens + 2 * sum(math.prod(shape[:-1]) for shape in arrays), 2 * len(arrays))


def tolerance(dtype: Any, work: Work) -> float:
    """The relative error to allow between two correct computations of one leaf, for this type of computation.

    - float64: 1e-12, the project's promise.
    - float32: 8 u sqrt(terms), u = 2^-24 the unit roundoff. The rounding errors of a sum of n terms add up like a
      random walk, to at most lambda u sqrt(n) but with probability 2 exp(-lambda^2 / 2) (Higham and Mary 2019,
      "A new approach to probabilistic rounding error analysis", theorem 2.4); lambda = 4, and both sides err.
    - bfloat16: 2 u sqrt(roundings), u = 2^-8. Sums are carried in float32, so only the rounding of stored results
      counts; over a leaf's many entries their random walk comes to its mean, lambda = 1, and both sides err.

    Raises ValueError for another type.
    """
    dtype = jnp.dtype(dtype)
    if dtype == jnp.float64:
        return 1e-12
    if dtype == jnp.float32:
        return 8 * 2.0**-24 * math.sqrt(work.terms)
    if dtype == jnp.bfloat16:
        return 2 * 2.0**-8 * math.sqrt(work.roundings)
    raise ValueError(f"no tolerance is stated for {dtype}; use float64, float32 or bfloat16")
