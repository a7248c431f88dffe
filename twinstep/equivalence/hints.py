"""Why do two results differ? What known mistakes leave behind, from the differing leaves alone.

A `Suspect` is the strongest hint: what a step that makes a certain mistake would have returned. If that is what the
candidate returned, the cause is found and not guessed.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from twinstep.equivalence.leaves import Leaf, Pairs, Rule, measured, paired


@dataclass(frozen=True)
class Suspect:
    """A known mistake."""

    mistake: str
    """Completes the sentence `this is exactly what comes of ...`."""
    result: Callable[[], Any]
    """What a step that makes it returns; groups that it does not touch may be left out."""
    copies: bool = False
    """Whether devices then hold copies that differ, of which `result` has the first."""


def hints(leaves: Sequence[Leaf], pairs: Pairs, axes: Mapping[str, int]) -> Iterator[str]:
    """What the differing leaves of each group have in common, and what that usually means.

    axes: the mesh axes of the candidate's result and their sizes.
    """
    groups = dict.fromkeys(leaf.group for leaf in leaves)
    differing = {group: [leaf for leaf in leaves if leaf.group == group and not leaf.equal] for group in groups}
    for group, wrong in differing.items():
        if wrong:
            everything = sum(leaf.group == group for leaf in leaves)
            many = {leaf.name for leaf in wrong if pairs[leaf.name][0].size > 1}
            yield from common_factor(group, wrong, everything, many, axes)
            yield from short_type(group, wrong)
            if any(not np.isfinite(pairs[leaf.name][1]).all() for leaf in wrong):
                yield f"{group}: not finite: a mean over no tokens at all on one device, or an overflow?"
    agreeing = {group.split(".")[-1] for group, wrong in differing.items() if not wrong}
    behind = {group.split(".")[-1] for group, wrong in differing.items() if wrong}
    if {"gradients", "grads"} & agreeing and {"parameters", "params", "update"} & behind:
        yield (
            "gradients agree and parameters do not: look at what comes after the gradients: clipping (by a norm that "
            "is not the global one?), learning rate, optimizer"
        )
    if "loss" in agreeing and {"gradients", "grads"} & behind:
        yield "the loss agrees and gradients do not: look at the backward pass and at how gradients are reduced"


def common_factor(
    group: str, wrong: Sequence[Leaf], everything: int, many: set[str], axes: Mapping[str, int]
) -> Iterator[str]:
    """A factor that the differing leaves share, and what it has to do with the sizes of the mesh's axes.

    many: the leaves of more than one number. A single number is always some factor of another, which says nothing
    unless the mesh has that size.
    """
    # A factor explains a leaf if the leaf's error is no larger than the factor's distance from 1.
    ratios = [leaf.ratio for leaf in wrong if leaf.relative <= 1.1 * abs(leaf.ratio - 1)]
    factor = float(np.median(ratios)) if ratios else math.nan
    if sum(math.isclose(ratio, factor, rel_tol=0.01) for ratio in ratios) < 0.75 * len(wrong):
        return
    likely = meaning(factor, axes)
    if many or likely:
        counted = f" ({len(wrong)} of {everything} leaves)" if everything > 1 else ""
        yield f"{group}: {written(factor)} times the reference{counted}{likely}"


def written(factor: float) -> str:
    """Four digits, or as many as it takes to tell it from 1."""
    return next(text for digits in (4, 6, 9, 17) if (text := f"{factor:.{digits}g}") != "1" or factor == 1)


def meaning(factor: float, axes: Mapping[str, int]) -> str:
    """What this factor has to do with the number of devices along one mesh axis or several, or nothing."""
    sizes = {name: size for name, size in axes.items() if size > 1}
    for number in range(1, len(sizes) + 1):
        for chosen in itertools.combinations(sizes, number):
            n = math.prod(sizes[name] for name in chosen)
            meanings = {
                n: "reduced twice, or summed where the mean is meant? (Under shard_map the gradient of replicated "
                'parameters is summed already; lax.pcast(params, axis, to="varying") keeps it local.)',
                n * n: "summed twice where the mean is meant?",
                1 / n: "averaged twice, or averaged where the sum is meant, or not yet summed?",
            }
            for size, text in meanings.items():
                if math.isclose(factor, size, rel_tol=0.01):
                    return f", on {n} devices along {' x '.join(chosen)}: {text}"
    return ""


def short_type(group: str, wrong: Sequence[Leaf]) -> Iterator[str]:
    """Rounding to a short type: errors of one size in all leaves, and no common factor."""
    sizes = [leaf.relative for leaf in wrong]
    typical = float(np.median(sizes))
    without_factor = sum(abs(leaf.ratio - 1) < 0.7 * leaf.relative for leaf in wrong)
    alike = sum(typical / 4 < size < 4 * typical for size in sizes)
    if min(without_factor, alike) < 0.75 * len(wrong) or len(wrong) < 3:
        return
    # The root mean square of rounding errors spread evenly over half a unit each way, in a number of average size.
    for name, roundoff in (("bfloat16", 2.0**-8), ("float16", 2.0**-11), ("float32", 2.0**-24)):
        if 0.1 * roundoff < typical < roundoff:
            yield (
                f"{group}: errors of about {typical:.1e} everywhere and no common factor, as rounding to {name} "
                f"(unit roundoff {roundoff:.1e}) makes: is something reduced, or kept, in {name}?"
            )
            return


def explained(
    suspects: Sequence[Suspect], wrong: Sequence[Leaf], found: Any, rule: Rule, drifted: set[str]
) -> Iterator[str]:
    """The suspects whose mistake gives what was found in all differing leaves of a group.

    drifted: the leaves whose copies differ. A group of one or two numbers proves nothing: that can be chance.
    """
    candidates = {name: right for name, (_, right) in paired(found, found, nan=True)[0].items()}
    numbers: dict[str, int] = {}
    for leaf in wrong:
        numbers[leaf.group] = numbers.get(leaf.group, 0) + candidates[leaf.name].size
    groups = {group for group, number in numbers.items() if number > 2}
    for suspect in suspects:
        about = {
            group: {leaf.name for leaf in wrong if leaf.group == group}
            for group in groups
            if suspect.copies == any(leaf.group == group and leaf.name in drifted for leaf in wrong)
        }
        if not about:
            continue
        given = paired(suspect.result(), found, nan=True)[0]
        # The mean over no tokens is NaN, and then NaN is what a suspect has to give.
        given = {name: finite(*pair) for name, pair in given.items() if name in candidates}
        matching = {leaf.name for leaf in measured(given, rule) if leaf.equal}
        named = sorted(group for group, names in about.items() if names <= matching)
        if named:
            yield f"{', '.join(named)}: exactly what comes of {suspect.mistake}"


def finite(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both with 0 in place of what is not finite, if that is at the same places."""
    if left.dtype.kind not in "biu" and np.array_equal(np.isfinite(left), np.isfinite(right)):
        return np.where(np.isfinite(left), left, 0), np.where(np.isfinite(right), right, 0)
    return left, right
