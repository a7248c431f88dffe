"""Small steps over a 2 x 4 mesh, for several tests."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

X = jnp.ones((8, 16))
"""float32; each device has 4 x 4 of it, 64 bytes."""


def two_by_four() -> Mesh:
    return jax.make_mesh((2, 4), ("data", "tensor"), (AxisType.Auto,) * 2)


def mapped(function: Callable[..., Any], **options: Any) -> Any:
    """The function on each device's part of an array like X."""
    spec = P("data", "tensor")
    return jax.jit(jax.shard_map(function, mesh=two_by_four(), in_specs=spec, out_specs=spec, **options))


def reduced(x: Array) -> Array:
    """An array like x, after an all_reduce over `tensor` of as many bytes."""
    return x + lax.psum(x, "tensor") / 4


def loop(goes_on: Callable[[Any], Any], after: Callable[[Any], Any], start: int = 0, dtype: Any = jnp.int32) -> Any:
    """A `while_loop` with an all_reduce in each turn, whose condition and step see the count and the array."""

    def body(state: Any) -> Any:
        return after(state[0]), reduced(state[1])

    return mapped(lambda x: lax.while_loop(goes_on, body, (dtype(start), x))[1])


def serialized(step: Any) -> bytes:
    """The compiled program of a step for X, as XLA describes it."""
    (module,) = step.lower(X).compile().runtime_executable().hlo_modules()
    return module.as_serialized_hlo_module_proto()
