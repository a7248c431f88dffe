"""Softmax attention over blocks of keys that come one after the other, without all scores at once.

Milakov and Gimelshein 2018, "Online normalizer calculation for softmax". Sizes in names: b batch, H heads, q queries,
k keys, K size of one head. Highest scores are constants to the gradient: they cancel out.
"""

import jax.numpy as jnp
from jax import Array, lax

SoFar = tuple[Array, Array, Array]
"""Weighted values (b, H, q, K), sum of weights (b, H, q, 1) and highest score (b, H, q, 1), in float32 or wider."""


def scores(query_bHqK: Array, key_bHkK: Array, seen_qk: Array | None = None) -> Array:
    """Scores (b, H, q, k), in float32 or wider; -inf where `seen_qk` is False."""
    found = jnp.einsum("bhqd,bhkd->bhqk", query_bHqK, key_bHkK)
    found = found.astype(jnp.promote_types(found.dtype, jnp.float32))
    return found if seen_qk is None else jnp.where(seen_qk, found, -jnp.inf)


def begin(scores_bHqk: Array, value_bHkK: Array) -> SoFar:
    """After the first block, in which every query must see a key."""
    return begin_at(scores_bHqk, value_bHkK, lax.stop_gradient(scores_bHqk.max(axis=-1, keepdims=True)))


def add(so_far: SoFar, scores_bHqk: Array, value_bHkK: Array) -> SoFar:
    """After one more block: what was there is scaled down to the new highest score."""
    mixed, total, before = so_far
    highest = jnp.maximum(before, lax.stop_gradient(scores_bHqk.max(axis=-1, keepdims=True)))
    new_mixed, new_total, _ = begin_at(scores_bHqk, value_bHkK, highest)
    scale = jnp.exp(before - highest)
    return mixed * scale + new_mixed, total * scale + new_total, highest


def begin_at(scores_bHqk: Array, value_bHkK: Array, highest_bHq1: Array) -> SoFar:
    """One block alone, measured from this score."""
    weights = jnp.exp(scores_bHqk - highest_bHq1)
    mixed = jnp.einsum("bhqk,bhkd->bhqd", weights.astype(value_bHkK.dtype), value_bHkK).astype(weights.dtype)
    return mixed, weights.sum(axis=-1, keepdims=True), highest_bHq1
