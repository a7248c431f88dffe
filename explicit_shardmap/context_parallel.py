"""Context parallelism by hand: each device has its own part of every sequence, for windows that one cannot hold.

Only attention looks beyond a device's own part. Keys and values go round in a ring (Liu et al. 2023, "Ring attention
with blockwise transformers for near-infinite context"), or each device takes whole sequences of its own heads (Jacobs
et al. 2023, "DeepSpeed Ulysses").
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from shared.model.online_softmax import add, begin, scores
from shared.model.transformer import causal_attention
from shared.placement.layout import Layout
from shared.placement.specs import sharded_axes


def positions(layout: Layout) -> Callable[[int], Array]:
    """A seam: number of positions on this device to their places in the whole sequence."""
    axes = tuple(axis for axis in sharded_axes(layout.stream) if axis in ("context", "tensor"))
    if not axes:
        return jnp.arange
    return lambda count: lax.axis_index(axes) * count + jnp.arange(count)


def attention(layout: Layout) -> Callable[..., Array]:
    """A seam: causal attention over the whole sequence."""
    if "context" not in layout.mesh.shape:
        return causal_attention
    attend = ulysses_attention if layout.strategy.attention == "ulysses" else ring_attention
    return partial(attend, layout)


def ulysses_attention(layout: Layout, query_btHK: Array, key_btHK: Array, value_btHK: Array, **unused: Any) -> Array:
    """Heads for positions, ordinary attention on whole sequences, and back. Returns (b, t, H, K)."""
    whole = (lax.all_to_all(x, "context", 2, 1, tiled=True) for x in (query_btHK, key_btHK, value_btHK))
    return lax.all_to_all(causal_attention(*whole), "context", 1, 2, tiled=True)


def ring_attention(layout: Layout, query_btHK: Array, key_btHK: Array, value_btHK: Array, **unused: Any) -> Array:
    """Each device's queries meet the keys and values of one device after the other. Returns (b, t, H, K).

    The softmax is computed as the blocks come (online_softmax.py). A device begins with its own block, the only
    one that is seen in part; blocks before it are seen whole, and those after it not at all: nothing is computed for
    them.
    """
    devices, me = lax.axis_size("context"), lax.axis_index("context")
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query_btHK, key_btHK, value_btHK))  # each (b, H, t, K)
    query = query * (query.shape[-1] ** -0.5)
    time = query.shape[2]
    causal_tt = jnp.arange(time)[:, None] >= jnp.arange(time)[None, :]
    so_far = begin(scores(query, key, causal_tt), value)

    @jax.checkpoint  # scores of one block are a device's share of (T, T): they are computed again, not kept
    def meet(so_far: Any, key: Array, value: Array, distance: Array) -> Any:
        return lax.cond(
            me >= distance,
            lambda: add(so_far, scores(query, key), value),
            lambda: so_far,
        )

    def turn(carry: Any, distance: Array) -> tuple[Any, None]:
        so_far, block = carry
        block = lax.ppermute(block, "context", [(device, (device + 1) % devices) for device in range(devices)])
        return (meet(so_far, *block, distance), block), None

    (so_far, _), _ = lax.scan(turn, (so_far, (key, value)), jnp.arange(1, devices))
    mixed_bHtK, total_bHt1, _ = so_far
    return jnp.swapaxes((mixed_bHtK / total_bHt1).astype(value.dtype), 1, 2)
