"""Tensor parallelism by placement: heads, d_ff and vocabulary of the parameters are sharded, and the rest follows.

Shoeybi et al. 2019, "Megatron-LM: training multi-billion parameter language models using model parallelism", section 3.
With sequence parallelism the sequence is sharded between the matmuls: Korthikanti et al. 2022, "Reducing activation
recomputation in large transformer models", section 4.2.2.
"""

from collections.abc import Callable

from jax import Array
from jax.sharding import PartitionSpec as P

from shared.model import loss
from shared.model.transformer import unchanged
from shared.placement.layout import Layout, constrained


def local_heads(layout: Layout) -> Callable[[int], int]:
    """A seam: all heads, since these functions see global arrays."""
    return unchanged


def before_column_parallel(layout: Layout) -> Callable[[Array], Array]:
    """A seam before the column-parallel matmuls: the sequence is replicated over `tensor`."""
    if "tensor" not in layout.mesh.shape:
        return unchanged
    return lambda x: constrained(layout.mesh, x, P(*layout.logits[:2]))


def mlp_hidden(layout: Layout) -> Callable[[Array], Array]:
    """A seam between the MLP's two matmuls: sharded as their weights are.

    Without it, XLA gathers the weights under sequence parallelism, and activations stay sharded along the sequence.
    """
    if "tensor" not in layout.mesh.shape:
        return unchanged
    return lambda x: constrained(layout.mesh, x, layout.logits)


def after_row_parallel(layout: Layout) -> Callable[[Array], Array]:
    """A seam after the row-parallel matmuls, before the bias: sharded as the residual stream, so XLA reduces here."""
    if "tensor" not in layout.mesh.shape:
        return unchanged
    return lambda x: constrained(layout.mesh, x, layout.residual)


def summed_loss(layout: Layout) -> Callable[[Array, Array, Array], Array]:
    """(logits, targets, weights) to the summed cross-entropy, of logits that stay sharded along the vocabulary."""
    if "tensor" not in layout.mesh.shape:
        return loss.summed_loss
    return lambda logits, *labels: loss.summed_loss(constrained(layout.mesh, logits, layout.logits), *labels)
