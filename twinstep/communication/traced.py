"""Which collectives are written in a function's source, in the order of its traced form (its jaxpr).

Only functions under `shard_map` name collectives. Their transposes are there too: the gradient of an all_gather is a
reduce_scatter, with the line of the all_gather. What is not understood is listed under the name of its primitive.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import jaxprs_in_params

from twinstep.communication.compiled import name_of
from twinstep.communication.entries import PRIMITIVES, Branch, Collective, Operand
from twinstep.communication.groups import AnyMesh, Groups, axes_of, linked
from twinstep.communication.meshes import described
from twinstep.communication.names import relative

SILENT = {"axis_index", "pvary", "pcast", "preduced", "reduced_vary_cast", "vary_unreduced_cast", "precv"}
"""Primitives that name mesh axes and send nothing over them; precv is the other end of a psend."""


def traced_collectives(step: Any, *args: Any, mesh: AnyMesh | None = None, **kwargs: Any) -> list[Collective]:
    """What a jitted (or pmapped) function's source sends for these arguments, arrays or `jax.ShapeDtypeStruct`s.

    mesh: whose axes to speak of; by default that of each `shard_map`. Over axes of one device nothing is sent, and
    they are left out. Each run of a `lax.scan`'s body counts; of a `while` the number is unknown. Raises ValueError
    for what cannot be traced.
    """
    if hasattr(step, "trace"):
        jaxpr = step.trace(*args, **kwargs).jaxpr
    elif hasattr(step, "lower"):  # what jax.pmap returns
        jaxpr = jax.make_jaxpr(step)(*args, **kwargs)
    elif hasattr(step, "compile") or hasattr(step, "runtime_executable"):
        raise ValueError("the step is lowered or compiled already; give the jitted function and its arguments")
    else:
        raise ValueError(f"{name_of(step)} is not jitted; give jax.jit of it, with arguments")
    return [entry for entry in Walk(mesh).walk(jaxpr, mesh, 1, ()) if entry.participants > 1]


class Walk:
    """A walk through one traced function."""

    def __init__(self, given: AnyMesh | None):
        self.given = given
        self.conditionals = itertools.count(1)

    def walk(
        self, jaxpr: Any, mesh: AnyMesh | None, count: int | None, branch: tuple[Branch, ...]
    ) -> Iterator[Collective]:
        """All collectives inside, through the jaxprs that operations have in their parameters."""
        for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            name, parameters = equation.primitive.name, equation.params
            if name == "cond":
                number, branches = next(self.conditionals), parameters["branches"]
                for index, inner in enumerate(branches):
                    yield from self.walk(inner, mesh, count, (*branch, Branch(number, index, len(branches))))
                continue
            inside = list(jaxprs_in_params(parameters))
            if kind := kind_of(equation, mesh, bool(inside)):
                yield describe(equation, kind, count, branch, mesh)
            turns = parameters["length"] if name == "scan" else None if name == "while" else 1
            runs = None if turns is None or count is None else turns * count
            own = self.mesh_of(parameters["mesh"]) if name == "shard_map" else mesh
            for inner in inside:
                yield from self.walk(inner, own, runs, branch)

    def mesh_of(self, own: AnyMesh) -> AnyMesh:
        """The mesh that was given, or else the `shard_map`'s. Raises ValueError if the given one lacks axes of it."""
        if self.given is None:
            return own
        for axis, size in own.shape.items():
            if self.given.shape.get(axis, 1) != size:
                raise ValueError(f"the step is for mesh {described(own)}, not {described(self.given)}; give that mesh")
        return self.given


def kind_of(equation: Any, mesh: AnyMesh | None, has_inside: bool) -> str | None:
    """The kind of collective that an operation is or begins, the primitive's name if it is not known, None for
    others."""
    name = equation.primitive.name
    begun = name.removesuffix("_start")
    if begun in PRIMITIVES:
        return PRIMITIVES[begun]
    if name in SILENT or name.removesuffix("_done") in PRIMITIVES or has_inside:
        return None
    return name if named_axes(equation, mesh) else None


def named_axes(equation: Any, mesh: AnyMesh | None) -> tuple[str, ...]:
    """The mesh axes that an operation's parameters name, in their order."""
    known = tuple(mesh.shape) if mesh is not None else ()
    found: list[str] = []
    for value in equation.params.values():
        parts = value if isinstance(value, tuple | list | set | frozenset) else (value,)
        found += [part for part in parts if isinstance(part, str) and part in known]
    return tuple(dict.fromkeys(found))


def describe(
    equation: Any, kind: str, count: int | None, branch: tuple[Branch, ...], mesh: AnyMesh | None
) -> Collective:
    """One collective, over the groups that its parameters name."""
    if mesh is None:
        raise ValueError(f"{equation.primitive.name} stands outside of any shard_map; give its mesh as mesh=")
    groups = device_groups(equation, named_axes(equation, mesh), mesh)
    shown = source_info_util.summarize(equation.source_info).split(" ")[0]
    file, _, rest = shown.partition(":")
    source = f"{relative(file)}:{rest.split(':')[0]}" if rest else "unknown"
    sent = equation.invars[:1] if kind == "ragged_all_to_all" else equation.invars  # the others say where and how much
    return Collective(
        kind=kind,
        axes=axes_of(groups, mesh) if max(map(len, groups)) > 1 else (),
        participants=max(map(len, groups)),
        operands=tuple(Operand(*size(value.aval), "", source) for value in sent),
        count=count,
        branch=branch,
    )


def size(aval: Any) -> tuple[int, str]:
    """Bytes and element type of an array on one device; random keys are the whole numbers that they are made of."""
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return aval.size * aval.dtype.itemsize, "uint32"
    return aval.size * aval.dtype.itemsize, aval.dtype.name


def device_groups(equation: Any, axes: Sequence[str], mesh: AnyMesh) -> Groups:
    """Groups of device positions in the mesh: rows along the named axes, or what groups or pairs make of each row."""
    names, sizes = tuple(mesh.shape), tuple(mesh.shape.values())
    along = [names.index(axis) for axis in axes]
    positions = np.moveaxis(np.arange(mesh.size).reshape(sizes), along, range(-len(along), 0))
    rows = positions.reshape(-1, int(np.prod([sizes[axis] for axis in along])))
    if (messages := equation.params.get("perm")) is not None:
        return linked((int(row[a]), int(row[b])) for row in rows for a, b in messages) or [[0]]
    parts = equation.params.get("axis_index_groups") or [range(rows.shape[1])]
    return [[int(row[index]) for index in part] for row in rows for part in parts]
