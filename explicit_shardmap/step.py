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

from explicit_shardmap import accumulation, context_parallel, data_parallel, fsdp, tensor_parallel
from shared.config import Config
from shared.data.batches import Batch
from shared.model.decoding import Cache, make_decode
from shared.model.loss import counted_tokens, sums_to_means
from shared.model.optimizer import clip
from shared.model.state import TrainState, example_keys, make_forward
from shared.model.transformer import Seams
from shared.placement.layout import Layout, layout
from shared.twin import Plan, Twin, step_metrics


def logits(plan: Plan, state: TrainState, tokens_bT: Array) -> Array:
    """Logits (b, T, V) of this device's rows, without dropout."""
    return plan.forward(state.params, tokens_bT)


def decode(plan: Plan, state: TrainState, cache: Cache, tokens_bS: Array, start: Array) -> tuple[Array, Cache]:
    """Logits (b, S, V) of further tokens of this device's rows, and the cache with them in it."""
    return plan.decode(state.params, cache, tokens_bS, start)


def loss_and_grads(plan: Plan, state: TrainState, batch: Batch) -> tuple[Array, optax.Updates, Array]:
    """Mean loss over the global batch, its gradients, and the number of counted tokens: equal on every device."""
    # Over the axes on which it is whole a parameter is made varying, so that the gradients below stay local.
    varying = partial(lax.pcast, to="varying")
    params = jax.tree.map(varying, state.params, plan.layout.reduce_axes)

    def local_sum(params: optax.Params, batch: Batch) -> Array:
        logits_bTV = plan.forward(params, batch.tokens, example_keys(state, batch.rows))
        return tensor_parallel.vocabulary_parallel_loss(plan, logits_bTV, batch.targets, batch.weights)

    sums = accumulation.accumulate(plan, jax.value_and_grad(local_sum), params, batch)
    tokens = counted_tokens(batch.weights, plan.config.model.dtype)
    # Devices may count different numbers of tokens, and then the mean of their means is not the mean: sums and counts
    # are averaged, and divided afterwards.
    sums, tokens = data_parallel.average(plan, (sums, tokens))
    loss, gradients = sums_to_means(sums, tokens)
    return loss, gradients, tokens * plan.layout.token_devices


def train_step(plan: Plan, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
    """The next state and the metrics of this step: every device makes the same update of its copy."""
    loss, gradients, tokens = loss_and_grads(plan, state, batch)
    norm = fsdp.norm(plan, gradients)
    gradients = clip(gradients, norm, plan.config.optimizer.clip)
    return fsdp.update(plan, state, gradients), step_metrics(loss, norm, tokens)


def seams(layout: Layout) -> Seams:
    """What each strategy has to say inside the model; nothing, where the mesh lacks its axis."""
    return Seams(
        attention=context_parallel.attention(layout),
        local_heads=tensor_parallel.local_heads(layout),
        after_row_parallel=tensor_parallel.after_row_parallel(layout),
        before_column_parallel=tensor_parallel.before_column_parallel(layout),
        mlp_hidden=tensor_parallel.mlp_hidden(layout),
        residual=fsdp.stream(layout),
        gather_outer_params=fsdp.gather(layout, layout.outer),
        gather_block_params=fsdp.gather(layout, layout.block),
        positions=context_parallel.positions(layout),
    )


def build(config: Config, mesh: Mesh) -> Twin:
    """The step of this configuration on this mesh. Raises ValueError for sizes that do not divide."""
    places = layout(config, mesh)
    decoding = make_decode(config, seams(places.with_whole_sequences()))
    plan = Plan(config, places, make_forward(config, seams(places)), decoding)
    state, batch, cache, everywhere = places.state, places.batch, places.cache, P()
    logits_BTV, logits_BSV = places.logits, places.with_whole_sequences().logits
    per_device = partial(jax.shard_map, mesh=mesh)
    return Twin(
        plan,
        logits=jax.jit(per_device(partial(logits, plan), in_specs=(state, batch.tokens), out_specs=logits_BTV)),
        decode=jax.jit(
            per_device(
                partial(decode, plan),
                in_specs=(state, cache, batch.rows, everywhere),
                out_specs=(logits_BSV, cache),
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
