"""Context parallelism by hand: sequences are sharded, for windows that one device cannot hold.

Only attention looks beyond a device's own part of the sequence. Keys and values go round in a ring (Liu et al. 2023,
"Ring attention with blockwise transformers for near-infinite context"), or (as in Jacobs et al. 2023, "DeepSpeed
Ulysses") each device attends over whole sequences with its own heads.

Sizes in names as in shared/model/transformer.py; small letters are those of one device: b of the batch, t of the
sequence, h of the heads.
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
    axes = tuple(axis for axis in sharded_axes(layout.residual) if axis in ("context", "tensor"))
    if not axes:
        return jnp.arange
    return lambda count: lax.axis_index(axes) * count + jnp.arange(count)


def attention(layout: Layout) -> Callable[..., Array]:
    """A seam: causal attention over the whole sequence."""
    if "context" not in layout.mesh.shape:
        return causal_attention
    return ulysses_attention if layout.strategy.attention == "ulysses" else ring_attention


def ulysses_attention(query_bthK: Array, key_bthK: Array, value_bthK: Array, **unused: Any) -> Array:
    """Exchange the sequence for heads, attend over whole sequences, and exchange back. Returns (b, t, h, K)."""
    to_heads = partial(lax.all_to_all, axis_name="context", split_axis=2, concat_axis=1, tiled=True)
    attended = causal_attention(*map(to_heads, (query_bthK, key_bthK, value_bthK)))
    return lax.all_to_all(attended, "context", split_axis=1, concat_axis=2, tiled=True)


def ring_attention(query_bthK: Array, key_bthK: Array, value_bthK: Array, **unused: Any) -> Array:
    """Each device's queries attend to the keys and values of one device after the other. Returns (b, t, h, K).

    The softmax is accumulated block by block (online_softmax.py). Start with the local block, which needs the causal
    mask. Earlier blocks are fully visible; later ones are skipped.
    """
    devices, me = lax.axis_size("context"), lax.axis_index("context")
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query_bthK, key_bthK, value_bthK))  # each (b, h, t, K)
    query = query * (query.shape[-1] ** -0.5)
    time = query.shape[2]
    causal_tt = jnp.arange(time)[:, None] >= jnp.arange(time)[None, :]
    so_far = begin(scores(query, key, causal_tt), value)

    @jax.checkpoint  # rematerialise: keeping a (t, t) block of scores for each turn would cost t times T
    def attend(so_far: Any, key: Array, value: Array, distance: Array) -> Any:
        return lax.cond(
            me >= distance,
            lambda: add(so_far, scores(query, key), value),
            lambda: so_far,
        )

    def turn(carry: Any, distance: Array) -> tuple[Any, None]:
        so_far, block = carry
        block = lax.ppermute(block, "context", [(device, (device + 1) % devices) for device in range(devices)])
        return (attend(so_far, *block, distance), block), None

    (so_far, _), _ = lax.scan(turn, (so_far, (key, value)), jnp.arange(1, devices))
    mixed_bhtK, total_bht1, _ = so_far
    return jnp.swapaxes((mixed_bhtK / total_bht1).astype(value.dtype), 1, 2)
