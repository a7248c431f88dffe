"""Many small arrays as a few flat ones, to send in as few messages."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


def group_by(sorts: Iterable[Any]) -> dict[Any, list[int]]:
    """The numbers of those of the same sort."""
    found: dict[Any, list[int]] = {}
    for number, sort in enumerate(sorts):
        found.setdefault(sort, []).append(number)
    return found


def assign(leaves: list[Any], size: int) -> list[list[int]]:
    """The leaves' numbers in buckets: neighbours of one type share a bucket of up to `size` bytes.

    A leaf of more than that has a bucket of its own.
    """
    buckets: list[list[int]] = []
    filled = 0
    for number, leaf in enumerate(leaves):
        bytes = leaf.size * leaf.dtype.itemsize
        if buckets and filled + bytes <= size and leaves[buckets[-1][0]].dtype == leaf.dtype:
            buckets[-1].append(number)
            filled += bytes
        else:
            buckets.append([number])
            filled = bytes
    return buckets


def join(tree: Any, size: int) -> list[Array]:
    """The tree's leaves, in buckets of up to `size` bytes, each a vector."""
    leaves = jax.tree.leaves(tree)
    return [jnp.concatenate([leaves[number].ravel() for number in bucket]) for bucket in assign(leaves, size)]


def split(buckets: list[Array], like: Any, size: int) -> Any:
    """The opposite of `join` with the same size: the buckets' contents in the shapes of a tree."""
    leaves, structure = jax.tree.flatten(like)
    pieces = []
    for bucket, numbers in zip(buckets, assign(leaves, size), strict=True):
        ends = np.cumsum([leaves[number].size for number in numbers])
        flat = jnp.split(bucket, ends[:-1])
        pieces += [piece.reshape(leaves[number].shape) for piece, number in zip(flat, numbers, strict=True)]
    return jax.tree.unflatten(structure, pieces)
