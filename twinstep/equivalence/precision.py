"""Was something kept in a shorter type on the way? The numbers themselves tell, where the tolerance is too wide to.

A number that was rounded to b significant bits has b, in whatever type it is returned. If every number of a leaf has
fewer bits than the reference's numbers, and lies as far from them as such a rounding moves it, then it was rounded.
"""

import jax.numpy as jnp
import numpy as np

from twinstep.equivalence.leaves import Leaf, Pairs, Rule

ENOUGH = 16
"""Numbers that a leaf must have: that each has two bits fewer than its type by chance happens once in 4^16 leaves."""
FEWER = 2
"""Significant bits that must be missing."""


def shorter_problems(leaves: tuple[Leaf, ...], pairs: Pairs, rule: Rule) -> list[str]:
    """A line for each leaf whose numbers were rounded to fewer bits than the computation's type has.

    Though within tolerance: a leaf beyond it has its line already.
    """
    lines = []
    for leaf in leaves:
        left, right = pairs[leaf.name]
        if not leaf.equal or left.dtype.kind in "biu" or (shown := rounded_to(left, right)) is None:
            continue
        has, needs = shown
        if has > jnp.finfo(rule.kind(left.dtype)).nmant:
            continue
        lines.append(
            f"{leaf.name}: every number has {has} significant bits or fewer, most of the reference's have more, up to "
            f"{needs}, and they differ as rounding to {has} bits makes them: is it reduced, or kept, in a shorter type?"
        )
    return lines


def rounded_to(left: np.ndarray, right: np.ndarray) -> tuple[int, int] | None:
    """The significant bits of right, and of left, if right looks like left rounded to so few; None if it does not."""
    left, right = left.astype(np.float64).ravel(), right.astype(np.float64).ravel()
    both = np.isfinite(left) & np.isfinite(right) & (left != 0) & (right != 0)
    left, right = left[both], right[both]
    if left.size < ENOUGH:
        return None
    has, needs = significant_bits(right), significant_bits(left)
    bits = int(has.max())
    # What is exact and short by nature (counts, halves) is so in the reference too, but for a last bit.
    if bits > needs.max() - FEWER or np.median(needs) <= bits or (needs > bits).mean() < 0.5:
        return None
    moved = np.abs(right - left) / np.abs(left)
    typical = 2.0 ** -(bits + 1)  # half a unit in the last of these bits is between this and twice this
    return (bits, int(needs.max())) if typical / 8 < np.median(moved) <= 2 * typical else None


def significant_bits(values: np.ndarray) -> np.ndarray:
    """Bits from the first 1 to the last of each number, which must be float64, finite and not 0."""
    fraction, _ = np.frexp(values)
    whole = np.abs(np.ldexp(fraction, 53)).astype(np.int64)  # exact: 53 bits, the first of which is 1
    lowest = whole & -whole
    return 53 - np.log2(lowest.astype(np.float64)).astype(np.int64)
