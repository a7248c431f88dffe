"""The model with a memory: logits of further tokens, given the attention keys and values of those before.

This is the fast path of generation. One new token costs the work of one token, where `Transformer.__call__` would
compute all of them again. tests/shared/generation/test_generate.py holds it to the full forward pass at every position.

Sizes in names as in shared/model/transformer.py; S is the number of further tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from shared.config import Config
from shared.model.transformer import Block, Seams, Transformer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Attention keys and values of the tokens so far, for every layer; places after them hold anything."""

    keys: Any
    """(L, B, T, H, K)."""
    values: Any
    """(L, B, T, H, K)."""


def abstract_cache(config: Config) -> Cache:
    """Shapes and types of the cache of a batch of `config.batch` sequences."""
    model = config.model
    shape = (model.layers, config.batch, model.seq_len, model.heads, model.d_model // model.heads)
    leaf = jax.ShapeDtypeStruct(shape, model.dtype)
    return Cache(leaf, leaf)


def decode(model: Transformer, cache: Cache, tokens_BS: Array, start: Array) -> tuple[Array, Cache]:
    """Logits (B, S, V) of tokens at the positions from `start`, and the cache with these tokens in it.

    What the cache holds from `start` on is not looked at. start + S may not exceed the window.
    """
    positions_S = start + jnp.arange(tokens_BS.shape[1])
    x_BSD = model.token_embedding(tokens_BS) + model.position_embedding(positions_S)
    block, parameters_L = nnx.split(model.blocks)

    def run_block(x_BSD: Array, layer: tuple[Any, Cache]) -> tuple[Array, Cache]:
        parameters, cache = layer
        return decode_block(nnx.merge(block, model.seams.gather_block_params(parameters)), cache, x_BSD, start)

    x_BSD, cache = lax.scan(run_block, x_BSD, (parameters_L, cache), unroll=model.config.unroll)
    return model.output(model.seams.before_column_parallel(model.norm(x_BSD))), cache


def decode_block(block: Block, cache: Cache, x_BSD: Array, start: Array) -> tuple[Array, Cache]:
    """One block on further tokens, with this layer's part of the cache: `Block.__call__` without dropout."""
    attention, normed_BSD = block.attention, block.before_column_parallel(block.norm_attention(x_BSD))
    cache = Cache(
        keys=lax.dynamic_update_slice_in_dim(cache.keys, attention.key(normed_BSD), start, axis=1),
        values=lax.dynamic_update_slice_in_dim(cache.values, attention.value(normed_BSD), start, axis=1),
    )
    x_BSD = x_BSD + attention.out(cached_attention(attention.query(normed_BSD), cache, start))
    return x_BSD + block.exchange(block.feed_forward, block.norm_feed_forward(x_BSD)), cache


def cached_attention(query_BSHK: Array, cache: Cache, start: Array) -> Array:
    """`causal_attention` of queries at the positions from `start` to all cached positions up to their own."""
    scores_BHST = jnp.einsum("bshk,bthk->bhst", query_BSHK * (query_BSHK.shape[-1] ** -0.5), cache.keys)
    scores_BHST = scores_BHST.astype(jnp.promote_types(scores_BHST.dtype, jnp.float32))
    sees_ST = start + jnp.arange(query_BSHK.shape[1])[:, None] >= jnp.arange(cache.keys.shape[1])[None, :]
    weights_BHST = jax.nn.softmax(jnp.where(sees_ST, scores_BHST, -jnp.inf), axis=-1)
    return jnp.einsum("bhst,bthk->bshk", weights_BHST.astype(cache.values.dtype), cache.values)


def make_decode(config: Config, seams: Seams = Seams()) -> Callable[..., tuple[Array, Cache]]:
    """`decode` as a pure function: (params, cache, tokens (B, S), start) to logits (B, S, V) and cache."""
    structure = nnx.graphdef(nnx.eval_shape(lambda: Transformer(config.model, seams, rngs=nnx.Rngs(0))))

    def decode_pure(params: Any, cache: Cache, tokens_BS: Array, start: Array) -> tuple[Array, Cache]:
        return decode(nnx.merge(structure, seams.gather_outer_params(params)), cache, tokens_BS, start)

    return decode_pure
