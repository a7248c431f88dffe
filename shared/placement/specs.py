"""What can be read from a PartitionSpec."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P


def shard_count(spec: P, degrees: Mapping[str, int]) -> int:
    """Number of shards of an array with this spec."""
    return math.prod(degrees[axis] for axis in sharded_axes(spec))


def fitting_spec(spec: P, mesh: Mapping[str, Any]) -> P:
    """The spec without the axes that the mesh does not have."""
    entries: list[Any] = []
    for entry in spec:
        names = tuple(name for name in ((entry,) if isinstance(entry, str) else entry or ()) if name in mesh)
        entries.append(names[0] if len(names) == 1 else names or None)
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def sharded_axes(spec: P) -> tuple[str, ...]:
    """The mesh axes named by a spec, in order."""
    return tuple(axis for entry in spec if entry for axis in ([entry] if isinstance(entry, str) else entry))


def sharded_dimension(spec: P, other: P) -> int:
    """The dimension that the other spec shards over more axes; -1 if there is none."""
    axes = [sharded_axes(P(entry)) for entry in (*spec, *(None,) * len(other))]
    return next((dimension for dimension, entry in enumerate(other) if sharded_axes(P(entry)) != axes[dimension]), -1)


def squares_by_axes(tree: Any, specs: Any) -> dict[tuple[str, ...], Any]:
    """The sum of squares of all leaves that are sharded over the same mesh axes, by those axes."""
    squares: dict[tuple[str, ...], Any] = {}
    for leaf, spec in zip(jax.tree.leaves(tree), jax.tree.leaves(specs), strict=True):
        axes = tuple(sorted(sharded_axes(spec)))
        squares[axes] = squares.get(axes, 0) + jnp.sum(jnp.square(leaf))
    return squares
