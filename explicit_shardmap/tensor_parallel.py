"""Tensor parallelism by hand: each device has its own heads, hidden units and tokens of the vocabulary.

Shoeybi et al. 2019, "Megatron-LM: training multi-billion parameter language models using model parallelism", section 3.
A product whose other operand's columns are split needs nothing; one whose rows are split gives parts of a sum, which
are added up before the bias. With `sequence` between these products each device has its own part of the sequence:
Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", section 4.2.2.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from shared.model import loss
from shared.model.transformer import unchanged
from shared.placement.layout import Layout
from shared.twin import Plan


def local_heads(layout: Layout) -> Callable[[int], int]:
    """A seam: how many of all heads a device has."""
    return lambda number: number // layout.mesh.shape.get("tensor", 1)


def before_column_parallel(layout: Layout) -> Callable[[Array], Array]:
    """A seam before the column-split products: all of the sequence, on every device.

    Forwards, `pcast` is nothing. Backwards it is an all-reduce, since every device has its own share of the gradient of
    what all of them read. Written once here, it is one all-reduce for query, key and value together.
    """
    if "tensor" not in layout.mesh.shape:
        return unchanged
    if layout.sequence_parallel:
        return lambda x_btD: lax.all_gather(x_btD, "tensor", axis=1, tiled=True)
    return lambda x_bTD: lax.pcast(x_bTD, "tensor", to="varying")


def mlp_hidden(layout: Layout) -> Callable[[Array], Array]:
    """A seam between the products: nothing to do, a device has computed its own hidden units and no others."""
    return unchanged


def after_row_parallel(layout: Layout) -> Callable[[Array], Array]:
    """A seam after the row-split products, before the bias: added inside, a bias would be counted n times."""
    if "tensor" not in layout.mesh.shape:
        return unchanged
    if layout.sequence_parallel:
        return lambda x_bTD: lax.psum_scatter(x_bTD, "tensor", scatter_dimension=1, tiled=True)
    return lambda x_bTD: lax.psum(x_bTD, "tensor")


def vocabulary_parallel_loss(plan: Plan, logits_bTv: Array, targets_bT: Array, weights_bT: Array) -> Array:
    """Sum over tokens of weight times cross-entropy, from logits split along the vocabulary, which stay where they are.

    Three numbers for each token cross devices: the largest logit, the sum of the exponentials, the target's logit.
    """
    if "tensor" not in plan.layout.mesh.shape:
        return loss.summed_loss(logits_bTv, targets_bT, weights_bT)
    logits_bTv = logits_bTv.astype(jnp.promote_types(logits_bTv.dtype, jnp.float32))
    size = logits_bTv.shape[-1]
    highest_bT = lax.pmax(lax.stop_gradient(logits_bTv.max(axis=-1)), "tensor")
    local_bT = targets_bT - lax.axis_index("tensor") * size
    mine_bT = (local_bT >= 0) & (local_bT < size)
    target_bT = jnp.take_along_axis(logits_bTv, jnp.clip(local_bT, 0, size - 1)[..., None], axis=-1)[..., 0]
    exponentials_bT = jnp.exp(logits_bTv - highest_bT[..., None]).sum(axis=-1)
    total_bT, target_bT = lax.psum((exponentials_bT, jnp.where(mine_bT, target_bT, 0)), "tensor")
    losses_bT = jnp.log(total_bT) + highest_bT - target_bT
    return jnp.sum(losses_bT * weights_bT.astype(losses_bT.dtype))
