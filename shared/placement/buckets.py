"""Many small arrays as a few flat ones, to send them in as few messages."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.flatten_util import ravel_pytree

from shared.placement.specs import sharded_axes


def in_buckets(reduce: Callable[[list[Array], Any], list[Array]], tree: Any, axes: Any, specs: Any, size: int) -> Any:
    """Apply `reduce(arrays, axes)` to all leaves of a tree, in buckets of up to `size` bytes; 0: each leaf as it is.

    axes: for each leaf the mesh axes to reduce it over; with none it is returned unchanged. specs: its PartitionSpec.
    Leaves share a bucket if they have one type, and are reduced and sharded over the same axes. (Joined with a leaf
    that is sharded over another axis, a replicated one would no longer count as equal on all devices.)
    """
    leaves, structure = jax.tree.flatten(tree)
    over, sharded = structure.flatten_up_to(axes), map(sharded_axes, jax.tree.leaves(specs))
    groups: dict[Any, list[int]] = {}
    for number, key in enumerate(zip(over, sharded, (leaf.dtype for leaf in leaves), strict=True)):
        if over[number]:
            groups.setdefault(key, []).append(number)
    for (names, *_), numbers in groups.items():
        buckets = [[number] for number in numbers] if size == 0 else assign(leaves, numbers, size)
        vectors, unravels = zip(*(raveled([leaves[number] for number in bucket]) for bucket in buckets), strict=True)
        for bucket, unravel, vector in zip(buckets, unravels, reduce(list(vectors), names), strict=True):
            for number, leaf in zip(bucket, unravel(vector), strict=True):
                leaves[number] = leaf
    return jax.tree.unflatten(structure, leaves)


def raveled(arrays: list[Array]) -> tuple[Array, Callable[[Array], list[Array]]]:
    """The arrays as one vector, with what takes them out of it again; a single one stays as it is."""
    return (arrays[0], lambda array: [array]) if len(arrays) == 1 else ravel_pytree(arrays)


def assign(leaves: list[Any], numbers: list[int], size: int) -> list[list[int]]:
    """The leaves' numbers in buckets: neighbours share a bucket of up to `size` bytes.

    A leaf of more than that has a bucket of its own.
    """
    buckets: list[list[int]] = []
    filled = 0
    for number in numbers:
        bytes = leaves[number].size * leaves[number].dtype.itemsize
        if buckets and filled + bytes <= size:
            buckets[-1].append(number)
            filled += bytes
        else:
            buckets.append([number])
            filled = bytes
    return buckets
