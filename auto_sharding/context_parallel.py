"""Context parallelism by placement: sequences are split, for windows that one device cannot hold.

Only attention looks beyond a device's own part. Keys and values are asked for whole, or (as in Jacobs et al. 2023,
"DeepSpeed Ulysses") whole sequences of a device's own heads. A ring cannot be asked for: no placement says it.
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
    """A seam: number of positions to their places in the sequence, which are the same, as all of them are seen here."""
    return jnp.arange


def attention(layout: Layout) -> Callable[..., Array]:
    """A seam: causal attention over the whole sequence; where `tensor` splits heads, this says so."""
    if not {"context", "tensor"} & set(layout.mesh.shape):
        return causal_attention
    attend = ulysses_attention if layout.strategy.attention == "ulysses" else attend_to_gathered_keys
    return partial(attend, layout)


def ulysses_attention(layout: Layout, query_BTHK: Array, key_BTHK: Array, value_BTHK: Array, **unused: Any) -> Array:
    """Heads for positions, ordinary attention on whole sequences, and back. Returns (B, T, H, K).

    Each is said twice. With the second alone the compiler would project whole sequences to a device's heads, and gather
    the residual stream for it.
    """
    rows, time, tensor = layout.logits
    heads = P(rows, None, tuple(axis for axis in (time, tensor) if axis))
    whole = (
        constrained(layout.mesh, constrained(layout.mesh, x, layout.logits), heads)
        for x in (query_BTHK, key_BTHK, value_BTHK)
    )
    return constrained(layout.mesh, constrained(layout.mesh, causal_attention(*whole), heads), layout.logits)


def attend_to_gathered_keys(
    layout: Layout, query_BTHK: Array, key_BTHK: Array, value_BTHK: Array, **unused: Any
) -> Array:
    """Each device's queries meet all keys and values, which are gathered. Returns (B, T, H, K)."""
    rows, _, tensor = layout.logits
    query_BTHK = constrained(layout.mesh, query_BTHK, layout.logits)
    key_BTHK, value_BTHK = (constrained(layout.mesh, x, P(rows, None, tensor)) for x in (key_BTHK, value_BTHK))
    return constrained(layout.mesh, causal_attention(query_BTHK, key_BTHK, value_BTHK), layout.logits)
