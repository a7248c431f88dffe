"""Tensor parallelism by hand: each device has its own heads, units of d_ff and entries of the vocabulary.

Shoeybi et al. 2019, "Megatron-LM: training multi-billion parameter language models using model parallelism", section 3.
With sequence parallelism the sequence is sharded between the matmuls: Korthikanti et al. 2022, "Reducing activation
recomputation in large transformer models", section 4.2.2.

A column-parallel matmul needs no communication. A row-parallel one gives parts of a sum, which are reduced before the
bias is added: inside the sum, a bias would be counted once for each device.
"""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import Array, lax

from shared.model import loss
from shared.model.transformer import unchanged
from shared.placement.layout import Layout


def local_heads(layout: Layout) -> Callable[[int], int]:
    """A seam: how many of all heads a device has."""
    return lambda number: number // layout.mesh.shape.get("tensor", 1)


def before_column_parallel(layout: Layout) -> Callable[[Array], Array]:
    """A seam before the column-parallel matmuls: the sequence is replicated over `tensor`.

    Forwards, `pcast` does nothing. Its transpose is an all-reduce, as every device has its own part of the gradient of
    what all of them read. Written once here, it is one all-reduce for query, key and value together.
    """
    if "tensor" not in layout.mesh.shape:
        return unchanged
    if layout.sequence_parallel:
        return lambda x: lax.all_gather(x, "tensor", axis=1, tiled=True)
    return lambda x: lax.pcast(x, "tensor", to="varying")


def mlp_hidden(layout: Layout) -> Callable[[Array], Array]:
    """A seam between the MLP's two matmuls: nothing to do, a device has computed its own units of d_ff only."""
    return unchanged


def after_row_parallel(layout: Layout) -> Callable[[Array], Array]:
    """A seam after the row-parallel matmuls, before the bias: reduced, to what the residual stream's sharding is."""
    if "tensor" not in layout.mesh.shape:
        return unchanged
    if layout.sequence_parallel:
        return lambda x: lax.psum_scatter(x, "tensor", scatter_dimension=1, tiled=True)
    return lambda x: lax.psum(x, "tensor")


def summed_loss(layout: Layout) -> Callable[[Array, Array, Array], Array]:
    """(logits, targets, weights) to the summed cross-entropy, of logits that stay sharded along the vocabulary."""
    if "tensor" not in layout.mesh.shape:
        return loss.summed_loss
    return partial(vocabulary_parallel_loss, "tensor")


def vocabulary_parallel_loss(axis: str, logits_btv: Array, targets_bt: Array, weights_bt: Array) -> Array:
    """Sum over tokens of weight times cross-entropy, in nats, from this device's entries v of the vocabulary.

    Three numbers for each token cross devices: the largest logit, the sum of the exponentials, the target's logit.
    """
    logits_btv = logits_btv.astype(jnp.promote_types(logits_btv.dtype, jnp.float32))
    size = logits_btv.shape[-1]
    highest_bt = lax.pmax(lax.stop_gradient(logits_btv.max(axis=-1)), axis)
    local_bt = targets_bt - lax.axis_index(axis) * size
    is_local_bt = (local_bt >= 0) & (local_bt < size)
    target_bt = jnp.take_along_axis(logits_btv, jnp.clip(local_bt, 0, size - 1)[..., None], axis=-1)[..., 0]
    exponentials_bt = jnp.exp(logits_btv - highest_bt[..., None]).sum(axis=-1)
    total_bt, target_bt = lax.psum((exponentials_bt, jnp.where(is_local_bt, target_bt, 0)), axis)
    losses_bt = jnp.log(total_bt) + highest_bt - target_bt
    return jnp.sum(losses_bt * weights_bt.astype(losses_bt.dtype))
