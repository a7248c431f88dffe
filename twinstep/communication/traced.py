"""Which collectives a function's author asked for, by name, in the order of its traced form (its jaxpr).

Only functions under `shard_map` name collectives. Their transposes are there too: the gradient of an all_gather is a
reduce_scatter, with the line of the all_gather.
"""

import math
from collections.abc import Iterator
from typing import Any

from jax.extend import source_info_util
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh

from twinstep.communication.account import PRIMITIVES, Collective, Operand
from twinstep.communication.compiled import relative


def requested(function: Any, arguments: tuple[Any, ...], mesh: Mesh) -> list[Collective]:
    """The collectives in the trace of a jitted function of these arguments, arrays or shapes.

    Over axes of one device nothing is sent, and they are left out. Each call of a loop's body counts (`lax.scan`); of
    a `while` it is not known how often.
    """
    return [entry for entry in walk(function.trace(*arguments).jaxpr, 1, mesh) if entry.participants > 1]


def walk(jaxpr: Any, count: int | None, mesh: Mesh) -> Iterator[Collective]:
    """All collectives inside, through the jaxprs that operations have in their parameters."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name = equation.primitive.name
        if name in PRIMITIVES:
            yield describe(equation, PRIMITIVES[name], count, mesh)
        turns = equation.params["length"] if name == "scan" else None if name == "while" else 1
        for inner in jaxprs_in_params(equation.params):
            yield from walk(inner, turns * count if turns and count else None, mesh)


def describe(equation: Any, kind: str, count: int | None, mesh: Mesh) -> Collective:
    """One collective, over the axes that its parameters name."""
    named = equation.params.get("axes", equation.params.get("axis_name"))
    named = named if isinstance(named, tuple | list) else (named,)
    axes = tuple(axis for axis in mesh.axis_names if axis in named and mesh.shape[axis] > 1)
    shown = source_info_util.summarize(equation.source_info).split(" ")[0]
    file, _, rest = shown.partition(":")
    source = f"{relative(file)}:{rest.split(':')[0]}" if rest else "unknown"
    sizes = [value.aval.size * value.aval.dtype.itemsize for value in equation.invars]
    return Collective(
        kind=kind,
        axes=axes,
        participants=math.prod(mesh.shape[axis] for axis in axes),
        operands=tuple(Operand(size, "", source) for size in sizes),
        count=count,
    )
