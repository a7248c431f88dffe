"""The transformer: one Flax NNX module that knows nothing of devices.

A block is LayerNorm, causal self-attention, residual, LayerNorm, feed-forward, residual ("pre-norm"). The blocks are
stacked: each of their parameters has a leading dimension L, and `lax.scan` runs one block over it, so that a deep
model compiles in the time of a shallow one.

`Seams` are the places where a parallel strategy may replace a plain function. On one device, and for data parallelism,
every seam is the plain function below.

Sizes in names: B batch, T sequence length, L layers, D d_model, F d_ff, H heads, K size of one head, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from shared.config import ModelConfig


def causal_attention(query_BTHK: Array, key_BTHK: Array, value_BTHK: Array, **unused: Any) -> Array:
    """Softmax attention in which position t sees positions 0 to t. Returns (B, T, H, K).

    Formula: Vaswani et al. 2017, "Attention is all you need", section 3.2.1. The scores are computed in the inputs'
    own type and the softmax in float32 or wider, so float64 stays float64 throughout. The scale is folded into the
    query and the normalisation is applied after the matmul with the values: both act on (T, K), not (T, T).
    NNX passes further options (mask, dropout, ...) that this model does not use.
    """
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query_BTHK, key_BTHK, value_BTHK))  # each (B, H, T, K)
    query = query * (query.shape[-1] ** -0.5)
    scores_BHTT = jnp.einsum("bhqk,bhsk->bhqs", query, key)
    scores_BHTT = scores_BHTT.astype(jnp.promote_types(scores_BHTT.dtype, jnp.float32))
    time = query.shape[2]
    causal_TT = jnp.arange(time)[:, None] >= jnp.arange(time)[None, :]
    scores_BHTT = jnp.where(causal_TT, scores_BHTT, -jnp.inf)
    weights_BHTT = jnp.exp(scores_BHTT - lax.stop_gradient(scores_BHTT.max(axis=-1, keepdims=True)))
    total_BHT1 = weights_BHTT.sum(axis=-1, keepdims=True)
    mixed = jnp.einsum("bhqs,bhsk->bhqk", weights_BHTT.astype(value.dtype), value)
    return jnp.swapaxes((mixed / total_BHT1).astype(value.dtype), 1, 2)


def matmul(left: Array, right: Array, dimensions: Any, **options: Any) -> Array:
    """`lax.dot_general` that accumulates in float32 or wider, here and in its gradients, and rounds once.

    Left to itself, XLA's CPU backend accumulates some bfloat16 matmuls in bfloat16: the gradient of `output` then had
    an error of 1.8 % after 256 tokens, in place of 0.2 %.
    """
    options["preferred_element_type"] = jnp.promote_types(left.dtype, jnp.float32)
    return lax.dot_general(left, right, dimensions, **options).astype(left.dtype)


def unchanged(x: Any) -> Any:
    """The identity: the plain form of a seam."""
    return x


@dataclass(frozen=True)
class Seams:
    """Where a strategy may replace a plain function; each twin's strategy files say with what."""

    attention: Callable[..., Array] = causal_attention
    """(query, key, value), each (B, T, H, K), to (B, T, H, K)."""
    local_heads: Callable[[int], int] = unchanged
    """Global head count to this device's head count: NNX's attention must know it before it sees its parameters."""
    after_row_parallel: Callable[[Array], Array] = unchanged
    """Applied to the result of a row-parallel matmul, whose contracted dimension may be sharded, before the bias."""
    before_column_parallel: Callable[[Array], Array] = unchanged
    """Applied to the input of a column-parallel matmul, whose weight's columns may be sharded, (B, T, D)."""
    mlp_hidden: Callable[[Array], Array] = unchanged
    """Applied to the MLP's activations between its two matmuls, (B, T, F)."""
    residual: Callable[[Array], Array] = unchanged
    """Applied to the residual stream at the embedding and after each block, (B, T, D)."""
    gather_outer_params: Callable[[Any], Any] = unchanged
    """Applied to all parameters as a pass through the model begins, for those outside the blocks."""
    gather_block_params: Callable[[Any], Any] = unchanged
    """Applied to one block's parameters as the loop over layers reads them."""
    positions: Callable[[int], Array] = jnp.arange
    """Number of this device's positions to their places in the sequence, (T,)."""


def dropout(x_BTD: Array, rate: float, keys_BT: Array | None) -> Array:
    """Zero a share `rate` of the entries and scale up the others; each token draws from its own key.

    Keys that belong to tokens, not to devices, give the same masks however batch and sequence are sharded.
    `keys_BT=None` means evaluation: nothing is dropped.
    """
    if keys_BT is None or rate == 0:
        return x_BTD
    share = jnp.float32(1 - rate)  # in float64 the same masks as in float32
    keep_BTD = jax.vmap(jax.vmap(lambda key: jax.random.bernoulli(key, share, x_BTD.shape[2:])))(keys_BT)
    return jnp.where(keep_BTD, x_BTD / (1 - rate), 0)


def token_keys(keys_B: Array | None, positions_T: Array) -> Array | None:
    """A key for each token (B, T), from its example's key and its position."""
    if keys_B is None:
        return None
    return jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(keys_B, positions_T)


def fold_in(keys_BT: Array | None, number: Array | int) -> Array | None:
    """A fresh key for each token, or None where there are none."""
    if keys_BT is None:
        return None
    return jax.vmap(jax.vmap(jax.random.fold_in, (0, None)), (0, None))(keys_BT, number)


class Block(nnx.Module):
    """One pre-norm transformer block, (B, T, D) to (B, T, D)."""

    def __init__(self, config: ModelConfig, seams: Seams, *, rngs: nnx.Rngs):
        options: dict[str, Any] = {"dtype": config.dtype, "param_dtype": config.param_dtype, "rngs": rngs}

        def reduced_matmul(*args: Any, **kwargs: Any) -> Array:
            return seams.after_row_parallel(matmul(*args, **kwargs))

        heads = seams.local_heads(config.heads)
        self.norm_attention = nnx.LayerNorm(config.d_model, **options)
        self.attention = nnx.MultiHeadAttention(
            heads,
            config.d_model,
            heads * (config.d_model // config.heads),
            config.d_model,
            decode=False,
            keep_rngs=False,
            attention_fn=seams.attention,
            qkv_dot_general=matmul,
            out_dot_general=reduced_matmul,
            **options,
        )
        self.norm_feed_forward = nnx.LayerNorm(config.d_model, **options)
        self.expand = nnx.Linear(config.d_model, config.d_ff, dot_general=matmul, **options)
        self.contract = nnx.Linear(config.d_ff, config.d_model, dot_general=reduced_matmul, **options)
        self.before_column_parallel, self.mlp_hidden = seams.before_column_parallel, seams.mlp_hidden
        self.rate = config.dropout

    def __call__(self, x_BTD: Array, keys_BT: Array | None) -> Array:
        with jax.named_scope("attention"):
            attended_BTD = self.attention(self.before_column_parallel(self.norm_attention(x_BTD)))
        x_BTD = x_BTD + dropout(attended_BTD, self.rate, fold_in(keys_BT, 0))
        with jax.named_scope("feed_forward"):
            fed_BTD = self.feed_forward(self.norm_feed_forward(x_BTD))
        return x_BTD + dropout(fed_BTD, self.rate, fold_in(keys_BT, 1))

    def feed_forward(self, x_BTD: Array) -> Array:
        return self.contract(nnx.gelu(self.mlp_hidden(self.expand(self.before_column_parallel(x_BTD)))))


class Transformer(nnx.Module):
    """Tokens (B, T) of whole numbers below V to logits (B, T, V)."""

    def __init__(self, config: ModelConfig, seams: Seams = Seams(), *, rngs: nnx.Rngs):
        options: dict[str, Any] = {"dtype": config.dtype, "param_dtype": config.param_dtype, "rngs": rngs}

        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(config, seams, rngs=rngs)

        small = nnx.initializers.normal(0.02)
        self.token_embedding = nnx.Embed(config.vocabulary, config.d_model, embedding_init=small, **options)
        self.position_embedding = nnx.Embed(config.seq_len, config.d_model, embedding_init=small, **options)
        self.blocks = stacked(rngs)
        self.norm = nnx.LayerNorm(config.d_model, **options)
        self.output = nnx.Linear(config.d_model, config.vocabulary, use_bias=False, dot_general=matmul, **options)
        self.config = config
        self.seams = seams

    def __call__(self, tokens_BT: Array, keys_B: Array | None = None) -> Array:
        """Logits (B, T, V). `keys_B` holds a random key for each example, for dropout; None means evaluation."""
        positions_T = self.seams.positions(tokens_BT.shape[1])
        with jax.named_scope("embedding"):
            x_BTD = self.token_embedding(tokens_BT) + self.position_embedding(positions_T)
        keys_BT = token_keys(keys_B, positions_T)
        x_BTD = self.seams.residual(dropout(x_BTD, self.config.dropout, fold_in(keys_BT, 0)))
        block, parameters_L = nnx.split(self.blocks)

        def run_block(x_BTD: Array, layer: tuple[Any, Array]) -> tuple[Array, None]:
            parameters, number = layer
            parameters = self.seams.gather_block_params(parameters)
            return self.seams.residual(nnx.merge(block, parameters)(x_BTD, fold_in(keys_BT, number))), None

        body = jax.checkpoint(run_block) if self.config.remat else run_block
        numbers_L = 1 + jnp.arange(self.config.layers)  # 0 was the embedding's
        with jax.named_scope("blocks"):
            x_BTD, _ = lax.scan(body, x_BTD, (parameters_L, numbers_L), unroll=self.config.unroll)
        with jax.named_scope("output"):
            return self.output(self.seams.before_column_parallel(self.norm(x_BTD)))
