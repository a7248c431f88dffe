"""The training step with every collective written by hand: functions of one device's shards, run by `shard_map`.

The two step.py have the same functions in the same order, so that their diff is the communication. For data parallelism
alone read minimal.py, the whole step on one page.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import optax
from jax import Array, lax

from explicit_shardmap import accumulation, data_parallel, zero
from shared.data.batches import Batch
from shared.model.loss import counted_tokens, sums_to_means
from shared.model.optimizer import clip
from shared.model.state import TrainState, example_keys, next_state
from shared.model.transformer import unchanged
from shared.placement.layout import Layout
from shared.placement.specs import squares_by_axes
from shared.twin import Plan, step_metrics


def compiled(layout: Layout, function: Callable[..., Any], inputs: Any, outputs: Any, donate: Any = ()) -> Any:
    """Compile a function, whose inputs and outputs are sharded by these PartitionSpecs."""
    function = jax.shard_map(function, mesh=layout.mesh, in_specs=inputs, out_specs=outputs)
    return jax.jit(function, donate_argnums=donate)


def logits(plan: Plan, state: TrainState, tokens: Array) -> Array:
    """Logits of every token, without dropout."""
    return plan.forward(state.params, tokens)


def loss_and_grads(plan: Plan, state: TrainState, batch: Batch) -> tuple[Array, optax.Updates, Array]:
    """Mean loss over the global batch, its gradients, and the number of counted tokens."""
    # Varying parameters have local gradients; those of replicated ones would arrive summed over the devices already.
    params = jax.tree.map(partial(lax.pcast, to="varying"), state.params, plan.layout.reduce_axes)

    def summed_loss(params: optax.Params, batch: Batch) -> Array:
        logits = plan.forward(params, batch.tokens, example_keys(state, batch.rows))
        return plan.summed_loss(logits, batch.targets, batch.weights)

    gradients_of = jax.value_and_grad(summed_loss)
    if plan.config.microbatches > 1:
        gradients_of = partial(accumulation.accumulate, plan, gradients_of)
    sums = gradients_of(params, batch)
    tokens = counted_tokens(batch.weights, plan.config.model.dtype)
    # Devices count different numbers of tokens, so that the mean of their means is not the mean: sums over sums is.
    sums, tokens = data_parallel.all_reduce(plan, (sums, tokens))
    loss, gradients = sums_to_means(sums, tokens)
    return loss, gradients, tokens


def global_norm(plan: Plan, gradients: optax.Updates) -> Array:
    """The gradients' global norm, over all leaves and devices."""
    # A sum of squares is reduced over exactly the axes over which its leaves are sharded.
    squares = squares_by_axes(gradients, plan.layout.state.params)
    return sum(lax.psum(total, axes) if axes else total for axes, total in squares.items()) ** 0.5


def train_step(plan: Plan, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
    """The next state and the metrics of this step."""
    loss, gradients, tokens = loss_and_grads(plan, state, batch)
    norm = global_norm(plan, gradients)
    gradients = clip(gradients, norm, plan.config.optimizer.clip)
    metrics = step_metrics(loss, norm, tokens)
    if plan.layout.strategy.shard_optimizer:
        return zero.update(plan, state, gradients), metrics
    return next_state(plan.config, state, gradients), metrics


def residual(layout: Layout) -> Callable[[Array], Array]:
    """A seam: the residual stream is sharded as the batch is."""
    return unchanged  # a device has activations of its own tokens and no others
