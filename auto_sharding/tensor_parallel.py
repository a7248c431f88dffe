"""Tensor parallelism by placement: heads, hidden units and vocabulary of the parameters are split, the rest follows.

Shoeybi et al. 2019, "Megatron-LM: training multi-billion parameter language models using model parallelism", section 3;
with `sequence` between the products each device has its own part of the sequence: Korthikanti et al. 2022, "Reducing
activation recomputation in large transformer models", section 4.2.2.
"""

from collections.abc import Callable

from jax import Array
from jax.sharding import PartitionSpec as P

from shared.model import loss
from shared.model.transformer import unchanged
from shared.placement.layout import Layout, constrained
from shared.twin import Plan


def local_heads(layout: Layout) -> Callable[[int], int]:
    """A seam: all heads are seen here, wherever they live."""
    return unchanged


def before_column_parallel(layout: Layout) -> Callable[[Array], Array]:
    """A seam before the column-split products: all of the sequence, on every device."""
    if "tensor" not in layout.mesh.shape:
        return unchanged
    return lambda x_BTD: constrained(layout.mesh, x_BTD, P(*layout.logits[:2]))


def mlp_hidden(layout: Layout) -> Callable[[Array], Array]:
    """A seam between the products: split as the weights are. Where `tensor` splits the stream's sequence too, the
    compiler would else gather weights, and leave some of this split along the sequence."""
    if "tensor" not in layout.mesh.shape:
        return unchanged
    return lambda x_BTF: constrained(layout.mesh, x_BTF, layout.logits)


def after_row_parallel(layout: Layout) -> Callable[[Array], Array]:
    """A seam after the row-split products: as the residual stream is split, before the bias is added."""
    if "tensor" not in layout.mesh.shape:
        return unchanged
    return lambda x_BTD: constrained(layout.mesh, x_BTD, layout.stream)


def vocabulary_parallel_loss(plan: Plan, logits_BTV: Array, targets_BT: Array, weights_BT: Array) -> Array:
    """Sum over tokens of weight times cross-entropy, from logits split along the vocabulary."""
    if "tensor" in plan.layout.mesh.shape:
        logits_BTV = constrained(plan.layout.mesh, logits_BTV, plan.layout.logits)
    return loss.summed_loss(logits_BTV, targets_BT, weights_BT)
