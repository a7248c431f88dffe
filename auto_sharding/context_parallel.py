"""Context parallelism by placement: sequences are sharded, for windows that one device cannot hold.

Only attention looks beyond a device's own part of the sequence. Keys and values are gathered, or (as in Jacobs et al.
2023, "DeepSpeed Ulysses") each device attends over whole sequences with its own heads. A ring is not available: no
sharding describes it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from shared.model.transformer import causal_attention
from shared.placement.layout import Layout, constrained


def positions(layout: Layout) -> Callable[[int], Array]:
    """A seam: number of positions to their places in the sequence, all of them, since global arrays are seen here."""
    return jnp.arange


def attention(layout: Layout) -> Callable[..., Array]:
    """A seam: causal attention over the whole sequence; where `tensor` shards heads, the constraints say so."""
    if not {"context", "tensor"} & set(layout.mesh.shape):
        return causal_attention
    attend = ulysses_attention if layout.strategy.attention == "ulysses" else attend_to_gathered_keys
    return partial(attend, layout)


def ulysses_attention(layout: Layout, query_BTHK: Array, key_BTHK: Array, value_BTHK: Array, **unused: Any) -> Array:
    """Reshard the sequence to heads, attend over whole sequences, and reshard back. Returns (B, T, H, K).

    Both the source and the target sharding are constrained. With the target alone, XLA moves the resharding before the
    projection and all-gathers the residual stream.
    """
    sequence, (rows, context, tensor) = layout.attention, layout.attention
    heads = P(rows, None, tuple(axis for axis in (context, tensor) if axis))
    by_heads = (
        constrained(layout.mesh, constrained(layout.mesh, x, sequence), heads)
        for x in (query_BTHK, key_BTHK, value_BTHK)
    )
    return constrained(layout.mesh, constrained(layout.mesh, causal_attention(*by_heads), heads), sequence)


def attend_to_gathered_keys(
    layout: Layout, query_BTHK: Array, key_BTHK: Array, value_BTHK: Array, **unused: Any
) -> Array:
    """Each device's queries attend to all keys and values, which are gathered. Returns (B, T, H, K)."""
    sequence, (rows, _, tensor) = layout.attention, layout.attention
    query_BTHK = constrained(layout.mesh, query_BTHK, sequence)
    key_BTHK, value_BTHK = (constrained(layout.mesh, x, P(rows, None, tensor)) for x in (key_BTHK, value_BTHK))
    return constrained(layout.mesh, causal_attention(query_BTHK, key_BTHK, value_BTHK), sequence)
