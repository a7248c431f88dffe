"""Two results compared leaf by leaf: how far apart, against how much that may be.

Allowed is the larger of two norms: the rule's tolerance times the norm of the reference leaf, and `MOVES` times how far
the leaf moves when the reference's inputs move by one unit in the last place (perturbation.py). So a leaf whose exact
value is zero (a key bias: softmax does not see a shift), which holds nothing but rounding, is measured against that. A
leaf's error is the norm of the difference over its scale: its norm, or what makes up for the difference of the two.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from twinstep.equivalence.tolerance import MOVES, Work, common_tolerance, tolerance
from twinstep.tree import group_of, named_leaves


@dataclass(frozen=True)
class Leaf:
    """One leaf compared."""

    name: str
    error: float
    """Norm of the difference over the scale (see the module); infinite where the two are not finite at the same
    places. Of integers, booleans and keys the share of entries that differ."""
    tolerance: float
    """0 for integers, booleans and keys."""
    ratio: float
    """The factor by which the candidate's leaf is longer along the reference's; NaN where that has no meaning."""
    rounding: float = 0.0
    """How much of the reference leaf rounding of the inputs alone may change, as a share of its norm."""

    @property
    def group(self) -> str:
        return group_of(self.name)

    @property
    def equal(self) -> bool:
        return self.error <= self.tolerance

    @property
    def relative(self) -> float:
        """Norm of the difference over the norm of the reference leaf alone."""
        return self.error * self.rounding / self.tolerance if self.tolerance else self.error

    @property
    def used(self) -> float:
        """Error over tolerance."""
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
    moved: Mapping[str, float] = field(default_factory=dict)
    """How far each leaf of the reference moves, as a norm, with one unit in the last place of the inputs."""
    moves: float = MOVES
    """How many such movements are allowed, where that is more than the tolerance times the leaf's norm."""

    def kind(self, leaf: np.dtype) -> np.dtype:
        """The type whose rounding counts: the computation's, or the leaf's where that is given in a shorter one."""
        shorter = self.dtype is None or jnp.finfo(leaf).eps > jnp.finfo(self.dtype).eps
        return jnp.dtype(leaf if shorter else self.dtype)

    def tolerance(self, leaf: np.dtype) -> float:
        return tolerance(self.kind(leaf), self.work) if self.relative is None else self.relative

    def common(self, leaf: np.dtype) -> float:
        """How far from 1 a factor common to leaves of this type may be."""
        return common_tolerance(self.kind(leaf), self.work) if self.relative is None else self.relative

    def scale(self, name: str, left: np.ndarray) -> float:
        """What the error of this leaf is relative to, so that `tolerance` times it is what is allowed."""
        allowed = self.tolerance(left.dtype)
        return max(norm(left), self.moves * self.moved.get(name, 0.0) / allowed if allowed else 0.0)


Pairs = dict[str, tuple[np.ndarray, np.ndarray]]


class Named(dict[str, Any]):
    """Leaves by name, as `named_results` gives them."""


def named_results(tree: Any) -> Named:
    """The leaves by name; None counts as one."""
    return tree if isinstance(tree, Named) else Named(named_leaves(tree, is_leaf=lambda node: node is None))


def paired(expected: Any, found: Any, python: Any = jnp.float32, nan: bool = False) -> tuple[Pairs, list[str]]:
    """The leaves of two trees by name, on the host, and a line for each pair that cannot be, or is not, equal.

    python: the type that the rounding of Python's floats has if both sides have one (float(loss) of float32 work).
    nan: whether leaves with NaN on both sides, which prove nothing, make a pair.
    Strings, functions and other objects are compared by ==, and have no pair.
    """
    ours, theirs = named_results(expected), named_results(found)
    problems = [
        f"{name}: only in the reference" for name, leaf in ours.items() if leaf is not None and name not in theirs
    ]
    problems += [
        f"{name}: only in the candidate" for name, leaf in theirs.items() if leaf is not None and name not in ours
    ]
    pairs: Pairs = {}
    for name in ours:
        if name not in theirs:
            continue
        left, right = ours[name], theirs[name]
        if not (is_number(left) and is_number(right)):
            if not same_object(left, right):
                problems.append(f"{name}: {describe(left)} in the reference, {describe(right)} in the candidate")
            continue
        one, other = plain(left, like=right, python=python), plain(right, like=left, python=python)
        if describe(one, left) != describe(other, right):
            problems.append(
                f"{name}: {describe(one, left)} in the reference, {describe(other, right)} in the candidate"
            )
        elif not nan and jnp.issubdtype(one.dtype, jnp.floating) and np.isnan(one).any() and np.isnan(other).any():
            problems.append(f"{name}: NaN in the reference and in the candidate, which proves nothing")
        else:
            pairs[name] = (one, other)
    return pairs, problems


def is_number(leaf: Any) -> bool:
    """Whether the leaf is an array or a number that has a type of its own."""
    if isinstance(leaf, (bool, int, float, complex)):
        return True
    return (
        isinstance(leaf, (jax.Array, np.ndarray, np.generic))
        and leaf.dtype not in (object, jax.dtypes.float0)
        and (is_key(leaf) or jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == bool)
    )


def is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def same_object(left: Any, right: Any) -> bool:
    """Whether two leaves that are no numbers are equal; what has no answer (and an array beside None) is not."""
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):  # float0, strings
        return left.dtype == right.dtype and left.shape == right.shape and bool(np.all(left == right))
    try:
        return left is right or (type(left) is type(right) and bool(left == right))
    except Exception:
        return False


def describe(leaf: Any, original: Any = None) -> str:
    """Type and shape of an array, the implementation of a key, the text of anything else."""
    if is_key(original):
        return f"{original.dtype}{list(original.shape)}"
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else f"{type(leaf).__name__} {leaf!r:.60}"


def plain(leaf: Any, like: Any = None, python: Any = jnp.float32) -> np.ndarray:
    """The leaf's values on the host; of a random key its words, of complex numbers their two parts.

    A Python number, which has no width, takes the type of `like` if that is a number of the same kind with a type, and
    `python` if neither has one.
    """
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    values = np.asarray(leaf)
    if isinstance(leaf, (int, float, complex)) and not isinstance(leaf, bool):
        typed = (
            isinstance(like, (jax.Array, np.ndarray, np.generic)) and not isinstance(like, float) and not is_key(like)
        )
        if isinstance(leaf, float) and typed and jnp.issubdtype(like.dtype, jnp.floating):
            values = values.astype(like.dtype)
        elif isinstance(leaf, float) and not typed:
            values = values.astype(python)
        elif typed and isinstance(leaf, int) and jnp.issubdtype(like.dtype, jnp.integer):
            fits = jnp.iinfo(like.dtype).min <= leaf <= jnp.iinfo(like.dtype).max
            values = values.astype(like.dtype) if fits else values
        elif typed and jnp.issubdtype(like.dtype, jnp.complexfloating):
            values = values.astype(like.dtype)
    return np.stack([values.real, values.imag]) if np.iscomplexobj(values) else values


def measured(pairs: Pairs, rule: Rule) -> tuple[Leaf, ...]:
    """Each pair's error, and what it may be. Raises ValueError, naming the leaf, for a type without a rule."""
    leaves = []
    for name, (left, right) in pairs.items():
        if not jnp.issubdtype(left.dtype, jnp.floating):
            leaves.append(Leaf(name, float(np.mean(left != right)) if left.size else 0.0, 0.0, math.nan))
            continue
        try:
            scale, allowed = rule.scale(name, left), rule.tolerance(left.dtype)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        size = norm(left)
        share = allowed * scale / size if size else math.inf if scale else 0.0
        leaves.append(Leaf(name, distance(left, right, scale), allowed, ratio(left, right), share))
    return tuple(leaves)


def blanked(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both in float64, with 0 in place of infinities of one sign that stand at the same places."""
    left, right = left.astype(np.float64), right.astype(np.float64)
    alike = np.isinf(left) & (left == right)
    return np.where(alike, 0, left), np.where(alike, 0, right)


def norm(values: np.ndarray) -> float:
    """Of the finite values; in float64, scaled so that squares neither overflow nor vanish."""
    values = values.astype(np.float64).ravel()
    values = np.abs(values[np.isfinite(values)])
    largest = float(values.max(initial=0))
    return largest * float(np.linalg.norm(values / largest)) if largest else 0.0


def distance(left: np.ndarray, right: np.ndarray, scale: float) -> float:
    """Norm of the difference over the scale; infinite where only one side is finite, or a difference has no scale."""
    left, right = blanked(left, right)
    if not (np.isfinite(left).all() and np.isfinite(right).all()):
        return math.inf
    difference = norm(right - left)
    return difference / scale if scale else math.inf if difference else 0.0


def ratio(left: np.ndarray, right: np.ndarray) -> float:
    """<left, right> / <left, left>: the factor of the best fit of the right by the left."""
    left, right = (side.ravel() for side in blanked(left, right))
    size = norm(left)
    return float((left / size) @ (right / size)) if size and np.isfinite(right).all() else math.nan
