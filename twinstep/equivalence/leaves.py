"""Two results compared leaf by leaf: how far apart, against how much that may be.

A leaf's error is the norm of the difference over the norm of the reference leaf, or over a floor in proportion to its
group's norm (`FLOOR`) where that is larger: a leaf whose true value is zero (a key bias: softmax does not see a shift)
holds nothing but rounding, and relative to itself any rounding is large.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from twinstep.equivalence.tolerance import Work, tolerance
from twinstep.tree import named_leaves

FLOOR, BFLOAT16_FLOOR = 1e-3, 1e-2
"""Share of the group's norm below which a leaf is not measured against itself. In a leaf whose true value is zero the
rounding is in proportion to what was summed, of which the group's norm tells the size; in bfloat16 it is coarser."""


@dataclass(frozen=True)
class Leaf:
    """One leaf compared."""

    name: str
    error: float
    """Norm of the difference, relative (see the module); infinite where either side is not finite."""
    tolerance: float
    ratio: float
    """The factor by which the candidate's leaf is longer along the reference's; NaN where the reference is zero."""

    @property
    def group(self) -> str:
        return self.name.split(".")[0]

    @property
    def equal(self) -> bool:
        return self.error <= self.tolerance

    @property
    def used(self) -> float:
        """Share of the tolerance used: its budget."""
        return self.error / max(self.tolerance, np.finfo(float).tiny)


@dataclass(frozen=True)
class Rule:
    """How far apart two leaves may be."""

    work: Work
    """Of the computation behind them (twinstep/equivalence/tolerance.py)."""
    dtype: Any = None
    """The type of the computation, if it is not that of each leaf."""
    relative: float | None = None
    """A tolerance of one's own in place of the rule's."""

    def __call__(self, leaf: np.dtype) -> float:
        """The tolerance for a leaf of this type; whole numbers and keys must be the same."""
        if not jnp.issubdtype(leaf, jnp.floating):
            return 0.0
        return tolerance(self.dtype or leaf, self.work) if self.relative is None else self.relative

    def floor(self, leaf: np.dtype) -> float:
        return BFLOAT16_FLOOR if jnp.dtype(self.dtype or leaf) == jnp.bfloat16 else FLOOR


Pairs = dict[str, tuple[np.ndarray, np.ndarray]]


def paired(expected: Any, found: Any) -> tuple[Pairs, list[str]]:
    """The leaves of two trees by name, on the host, and a line for each that has no partner of its shape and type."""
    ours, theirs = named_leaves(expected), named_leaves(found)
    problems = [f"{name}: only in the reference" for name in ours if name not in theirs]
    problems += [f"{name}: only in the candidate" for name in theirs if name not in ours]
    pairs: Pairs = {}
    for name in ours:
        if name in theirs:
            left, right = plain(ours[name]), plain(theirs[name])
            if left.shape != right.shape or left.dtype != right.dtype:
                kinds = (f"{side.dtype}{list(side.shape)}" for side in (left, right))
                problems.append(f"{name}: {' in the reference, '.join(kinds)} in the candidate")
            else:
                pairs[name] = (left, right)
    return pairs, problems


def measured(pairs: Pairs, rule: Rule) -> tuple[Leaf, ...]:
    """Each pair's error, and what it may be."""
    squares: dict[str, float] = {}
    for name, (left, _) in pairs.items():
        group = name.split(".")[0]
        squares[group] = squares.get(group, 0.0) + norm(left) ** 2
    return tuple(
        Leaf(
            name,
            error(left, right, rule.floor(left.dtype) * math.sqrt(squares[name.split(".")[0]])),
            rule(left.dtype),
            ratio(left, right),
        )
        for name, (left, right) in pairs.items()
    )


def common_factors(pairs: Pairs) -> dict[str, float]:
    """Of each group, the factor by which the candidate is longer along the reference, all leaves as one."""
    products: dict[str, np.ndarray] = {}
    for name, (left, right) in pairs.items():
        if jnp.issubdtype(left.dtype, jnp.floating):
            left, right = left.astype(np.float64).ravel(), right.astype(np.float64).ravel()
            group = name.split(".")[0]
            products[group] = products.get(group, np.zeros(2)) + np.array([left @ right, left @ left])
    return {group: float(both / square) for group, (both, square) in products.items() if square > 0}


def plain(leaf: Any) -> np.ndarray:
    """The leaf's values on the host; of a random key its words, of complex numbers their two parts."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    values = np.asarray(leaf)
    return np.stack([values.real, values.imag]) if np.iscomplexobj(values) else values


def norm(values: np.ndarray) -> float:
    return float(np.linalg.norm(values.astype(np.float64).ravel()))


def error(left: np.ndarray, right: np.ndarray, floor: float) -> float:
    """Norm of the difference over the larger of the left norm and the floor."""
    left, right = left.astype(np.float64), right.astype(np.float64)
    if not (np.isfinite(left).all() and np.isfinite(right).all()):
        return math.inf
    distance, scale = norm(right - left), max(norm(left), floor)
    return distance / scale if scale else math.inf if distance else 0.0


def ratio(left: np.ndarray, right: np.ndarray) -> float:
    """<left, right> / <left, left>: the factor of the best fit of the right by the left."""
    left, right = left.astype(np.float64).ravel(), right.astype(np.float64).ravel()
    square = float(left @ left)
    return float(left @ right) / square if square > 0 else math.nan
