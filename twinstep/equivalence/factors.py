"""A factor common to many leaves: too small to be seen in one of them, certain in all of them together."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from twinstep.equivalence.leaves import Leaf, Pairs, Rule

EVERYTHING = "everything"


class Factor(NamedTuple):
    """The factor by which the candidate's leaves, taken together, are longer along the reference's."""

    value: float
    allowed: float
    """How far from 1 it may be."""
    leaves: int


def common_factors(leaves: Sequence[Leaf], pairs: Pairs, rule: Rule) -> Mapping[str, Factor]:
    """The factor of each group of more than one floating leaf, and of all leaves, named `EVERYTHING`.

    A mean of the leaves' own factors, each with the weight 1 / s^2, where s is how far rounding alone may move it: so
    a leaf that holds nothing but rounding has no say, and a leaf of large numbers no more than one of small ones. The
    leaves' errors are taken to be independent, which leaves 1 / sqrt(sum of 1 / s^2) of them in the mean; what is
    common to all leaves of a correct computation (`common_tolerance`) is allowed beside it.
    """
    members: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        if jnp.issubdtype(pairs[leaf.name][0].dtype, jnp.floating) and math.isfinite(leaf.ratio):
            members.setdefault(leaf.group, []).append(leaf)
            members.setdefault(EVERYTHING, []).append(leaf)
    return {
        group: weighted(own, max(rule.common(pairs[leaf.name][0].dtype) for leaf in own))
        for group, own in members.items()
        if len(own) > 1 and any(leaf.rounding for leaf in own) and (group != EVERYTHING or len(members) > 2)
    }


def weighted(leaves: Sequence[Leaf], common: float) -> Factor:
    weights = [leaf.rounding**-2 for leaf in leaves if leaf.rounding]
    ratios = [leaf.ratio for leaf in leaves if leaf.rounding]
    total = sum(weights)
    value = sum(weight * ratio for weight, ratio in zip(weights, ratios, strict=True)) / total
    return Factor(value, common + total**-0.5, len(ratios))
