"""How far apart two correct computations may be: the rule, from the type and the shapes. docs/proof.md explains it."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff u of each type for which there is a rule."""
COMMON = 4
"""Units of roundoff by which all leaves together may be longer or shorter in a short type (see `common_tolerance`)."""
MOVES = 8.0
"""Movements, by one unit in the last place of the inputs, that two correct results may be apart (perturbation.py): a
movement is one random walk of roundings, 2 lambda of them are allowed as in `tolerance`, with lambda = 4 in every type,
since a leaf to which this applies may be a single number."""
EXACT = 1e-10
"""Relative error allowed where both functions are computed in float64."""


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
    return Work(tokens + 2 * sum(math.prod(shape[:-1]) for shape in arrays), max(2 * len(arrays), 2))


def roundoff(dtype: Any) -> float:
    """Raises ValueError for a type for which no rule is stated."""
    name = jnp.dtype(dtype).name
    if name not in ROUNDOFF:
        raise ValueError(f"no tolerance is stated for {name}; return float64, float32, float16 or bfloat16")
    return ROUNDOFF[name]


def tolerance(dtype: Any, work: Work) -> float:
    """The relative error to allow between two correct computations of one leaf, for this type of computation.

    - float64: 1e-12, the project's promise.
    - float32: 8 u sqrt(terms), u = 2^-24 the unit roundoff. The rounding errors of a sum of n terms add up like a
      random walk, to at most lambda u sqrt(n) but with probability 2 exp(-lambda^2 / 2) (Higham and Mary 2019,
      "A new approach to probabilistic rounding error analysis", theorem 2.4); lambda = 4, and both sides err.
    - bfloat16, float16: 2 u sqrt(roundings), u = 2^-8 and 2^-11. Sums are carried in float32, so only the rounding of
      stored results counts; over a leaf's many entries their random walk comes to its mean, lambda = 1, and both err.

    Raises ValueError for another type.
    """
    unit, name = roundoff(dtype), jnp.dtype(dtype).name
    if name == "float64":
        return 1e-12
    return 8 * unit * math.sqrt(work.terms) if name == "float32" else 2 * unit * math.sqrt(work.roundings)


def common_tolerance(dtype: Any, work: Work) -> float:
    """How far from 1 a factor common to all leaves may be, before the leaves' own errors are added.

    In float32 and float64 a norm or a count that everything is divided by is a sum like any other: `tolerance`. In a
    short type such sums are carried in float32, and only the few results that all leaves share (the loss, its
    cotangent, a norm, a learning rate) are rounded: four on each side, 2 u sqrt(4).
    """
    rule = tolerance(dtype, work)
    return rule if jnp.dtype(dtype).itemsize > 2 else min(rule, COMMON * roundoff(dtype))
