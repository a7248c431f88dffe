"""Was a leaf rounded to a shorter type on the way? Its significant bits show it where the tolerance is too wide.

A number rounded to b significant bits keeps at most b in any type that it is cast to later. A leaf was rounded if all
of its numbers have fewer bits than the reference's, and differ from them by as much as that rounding moves a number.
"""

import math

import jax.numpy as jnp
import numpy as np

from twinstep.equivalence.leaves import Leaf, Pairs, Rule

ENOUGH = 16
"""Numbers that a leaf must have. That all of them lack `FEWER` bits by chance happens once in 4^16 leaves."""
FEWER = 2
"""Significant bits that must be missing."""


def shorter_problems(leaves: tuple[Leaf, ...], pairs: Pairs, rule: Rule) -> list[str]:
    """Return a line for each leaf within tolerance that was rounded to fewer bits than the computation's type has.

    A leaf beyond its tolerance differs already, and a tolerance of the user's own allows for such a rounding.
    """
    lines = []
    for leaf in leaves if rule.relative is None else ():
        left, right = pairs[leaf.name]
        if not (leaf.equal and jnp.issubdtype(left.dtype, jnp.floating)):
            continue
        has, needs = rounded_to(left, right) or (math.inf, 0)
        if has <= jnp.finfo(rule.kind(left.dtype)).nmant:
            lines.append(
                f"{leaf.name}: no number has more than {has} significant bits, most of the reference's do (up to "
                f"{needs}), and they differ as after rounding to {has}: is it reduced, or kept, in a shorter type?"
            )
    return lines


def rounded_to(left: np.ndarray, right: np.ndarray) -> tuple[int, int] | None:
    """Return the significant bits of right and of left if right looks like left rounded to fewer, and else None."""
    left, right = left.astype(np.float64).ravel(), right.astype(np.float64).ravel()
    both = np.isfinite(left) & np.isfinite(right) & (left != 0) & (right != 0)
    left, right = left[both], right[both]
    if left.size < ENOUGH:
        return None
    has, needs = significant_bits(right), significant_bits(left)
    bits = int(has.max())
    if bits > needs.max() - FEWER or np.median(needs) <= bits:
        return None
    # Counts and halves have few bits too, but then the reference differs by its own last bit only.
    moved = np.abs(right - left) / np.abs(left)
    typical = 2.0 ** -(bits + 1)  # rounding moves a number by at most twice this share of it
    return (bits, int(needs.max())) if typical / 8 < np.median(moved) <= 2 * typical else None


def significant_bits(values: np.ndarray) -> np.ndarray:
    """Return the bits from the highest 1 to the lowest of each number, which must be float64, finite and not 0."""
    fraction, _ = np.frexp(values)
    whole = np.abs(np.ldexp(fraction, 53)).astype(np.int64)  # float64 has a significand of 53 bits: nothing is lost
    lowest = whole & -whole
    return 53 - np.log2(lowest.astype(np.float64)).astype(np.int64)
