"""The mesh of a step, found in its arguments, its source, or its compiled form."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from twinstep.communication.groups import AnyMesh

REMEDY = "give it as mesh=: a jax.sharding.Mesh whose devices are in the order of the program's"


def meshes_of(values: Any) -> Iterator[AnyMesh]:
    """The meshes of all shardings in a pytree of arrays, shapes or shardings."""
    for leaf in jax.tree.leaves(values):
        sharding = leaf if isinstance(leaf, jax.sharding.Sharding) else getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            yield sharding.mesh


def traced_meshes(jaxpr: Any) -> Iterator[AnyMesh]:
    """The meshes that a traced function names: of its `shard_map`s, constraints, and inner jitted functions."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        for value in equation.params.values():
            if isinstance(value, Mesh | AbstractMesh):
                yield value
            elif isinstance(value, NamedSharding | tuple | list):
                yield from meshes_of(value)
        for inner in jaxprs_in_params(equation.params):
            yield from traced_meshes(inner)


def the_mesh(found: Iterable[AnyMesh]) -> AnyMesh | None:
    """The one mesh of several mentions, those with devices first; None if there is none with several devices.

    Raises ValueError for meshes with different axes, or the same over other devices.
    """
    several = [mesh for mesh in found if math.prod(mesh.shape.values()) > 1]
    concrete = [mesh for mesh in several if isinstance(mesh, Mesh)]
    for mesh in (*concrete, *several):
        first = (concrete or several)[0]
        same = tuple(mesh.shape.items()) == tuple(first.shape.items())
        if not same or (isinstance(mesh, Mesh) and mesh.device_ids.tolist() != first.device_ids.tolist()):
            raise ValueError(f"the step has several meshes, {described(first)} and {described(mesh)}; {REMEDY}")
    return (concrete or several or [None])[0]


def described(mesh: AnyMesh) -> str:
    return "(" + ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items()) + ")"
