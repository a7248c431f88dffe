"""The training step, with every collective written by hand.

`shard_map` runs these functions once on each device, with that device's piece of each array: small letters in names
are its local sizes. What crosses devices is a `lax` collective over a mesh axis, written where it happens; nothing
else does. In JAX's words the axes are *manual* here (its *explicit* axes are another thing: shardings in types).
Compare auto_sharding/step.py, which has the same functions in the same order.
"""

from functools import partial

import jax
import optax
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from explicit_shardmap import data_parallel
from shared.config import Config
from shared.data import Batch
from shared.decoding import Cache, make_extend
from shared.loss import counted_tokens, divided, summed_loss
from shared.optimizer import clip
from shared.placement import layout
from shared.state import TrainState, example_keys, make_forward, next_state
from shared.twin import Plan, Twin, metrics_of


def logits(plan: Plan, state: TrainState, tokens_bT: Array) -> Array:
    """Logits (b, T, V) of this device's rows, without dropout."""
    return plan.forward(state.params, tokens_bT)


def extend(plan: Plan, state: TrainState, cache: Cache, tokens_bS: Array, start: Array) -> tuple[Array, Cache]:
    """Logits (b, S, V) of further tokens of this device's rows, and the cache with them in it."""
    return plan.extend(state.params, cache, tokens_bS, start)


def loss_and_grads(plan: Plan, state: TrainState, batch: Batch) -> tuple[Array, optax.Updates, Array]:
    """Mean loss over the global batch, its gradients, and the number of counted tokens: equal on every device."""
    axes = plan.layout.batch_axes
    keys_b = example_keys(state, batch.rows)
    params = lax.pcast(state.params, axes, to="varying")  # so that the gradients below stay local

    def local_sum(params: optax.Params) -> Array:
        logits_bTV = plan.forward(params, batch.tokens, keys_b)
        return summed_loss(logits_bTV, batch.targets, batch.weights)

    tokens = counted_tokens(batch.weights, plan.config.model.dtype)
    # Devices may count different numbers of tokens, and then the mean of their means is not the mean: sums and counts
    # are averaged, and divided afterwards.
    sums, tokens = data_parallel.average(plan, (jax.value_and_grad(local_sum)(params), tokens))
    loss, gradients = divided(sums, tokens)
    return loss, gradients, tokens * lax.axis_size(axes)


def train_step(plan: Plan, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
    """The next state and the metrics of this step: every device makes the same update of its copy."""
    loss, gradients, tokens = loss_and_grads(plan, state, batch)
    norm = optax.tree.norm(gradients)
    gradients = clip(gradients, norm, plan.config.optimizer.clip)
    return next_state(plan.config, state, gradients), metrics_of(loss, norm, tokens)


def build(config: Config, mesh: Mesh) -> Twin:
    """The step of this configuration on this mesh. Raises ValueError for sizes that do not divide."""
    plan = Plan(config, layout(config, mesh), make_forward(config), make_extend(config))
    state, batch, cache, everywhere = plan.layout.state, plan.layout.batch, plan.layout.cache, P()
    per_device = partial(jax.shard_map, mesh=mesh)
    return Twin(
        plan,
        logits=jax.jit(per_device(partial(logits, plan), in_specs=(state, batch.tokens), out_specs=batch.tokens)),
        extend=jax.jit(
            per_device(
                partial(extend, plan),
                in_specs=(state, cache, batch.tokens, everywhere),
                out_specs=(batch.tokens, cache),
            ),
            donate_argnums=1,
        ),
        loss_and_grads=jax.jit(
            per_device(
                partial(loss_and_grads, plan),
                in_specs=(state, batch),
                out_specs=(everywhere, state.params, everywhere),
            )
        ),
        train_step=jax.jit(
            per_device(
                partial(train_step, plan),
                in_specs=(state, batch),
                out_specs=(state, everywhere),
            ),
            donate_argnums=0,
        ),
    )
