"""The training step, with communication left to the compiler.

Arrays are placed (`NamedSharding`), and an ordinary step is compiled for where they live (`jit`). The functions see
global arrays, and nothing in them sends anything: XLA inserts the collectives. Compare explicit_shardmap/step.py,
which has the same functions in the same order.
"""

from functools import partial

import jax
import optax
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from auto_sharding import accumulation, context_parallel, data_parallel, fsdp, tensor_parallel
from shared.config import Config
from shared.data.batches import Batch
from shared.model.decoding import Cache, make_decode
from shared.model.loss import counted_tokens, sums_to_means
from shared.model.optimizer import clip
from shared.model.state import TrainState, example_keys, make_forward
from shared.model.transformer import Seams
from shared.placement.layout import Layout, layout
from shared.twin import Plan, Twin, step_metrics


def logits(plan: Plan, state: TrainState, tokens_BT: Array) -> Array:
    """Logits (B, T, V) of the global batch, without dropout."""
    return plan.forward(state.params, tokens_BT)


def decode(plan: Plan, state: TrainState, cache: Cache, tokens_BS: Array, start: Array) -> tuple[Array, Cache]:
    """Logits (B, S, V) of further tokens of the global batch, and the cache with them in it."""
    return plan.decode(state.params, cache, tokens_BS, start)


def loss_and_grads(plan: Plan, state: TrainState, batch: Batch) -> tuple[Array, optax.Updates, Array]:
    """Mean loss over the global batch, its gradients, and the number of counted tokens."""

    def global_sum(params: optax.Params, batch: Batch) -> Array:
        logits_BTV = plan.forward(params, batch.tokens, example_keys(state, batch.rows))
        return tensor_parallel.vocabulary_parallel_loss(plan, logits_BTV, batch.targets, batch.weights)

    sums = accumulation.accumulate(plan, jax.value_and_grad(global_sum), state.params, batch)
    tokens = counted_tokens(batch.weights, plan.config.model.dtype)
    sums, tokens = data_parallel.average(plan, (sums, tokens))
    loss, gradients = sums_to_means(sums, tokens)
    return loss, gradients, tokens


def train_step(plan: Plan, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
    """The next state and the metrics of this step."""
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
    state, batch, cache, everywhere = map(places.shardings, (places.state, places.batch, places.cache, P()))
    logits_BTV, logits_BSV = map(places.shardings, (places.logits, places.with_whole_sequences().logits))
    return Twin(
        plan,
        logits=jax.jit(partial(logits, plan), in_shardings=(state, batch.tokens), out_shardings=logits_BTV),
        decode=jax.jit(
            partial(decode, plan),
            in_shardings=(state, cache, batch.rows, everywhere),
            out_shardings=(logits_BSV, cache),
            donate_argnums=1,
        ),
        loss_and_grads=jax.jit(
            partial(loss_and_grads, plan),
            in_shardings=(state, batch),
            out_shardings=(everywhere, state.params, everywhere),
        ),
        train_step=jax.jit(
            partial(train_step, plan),
            in_shardings=(state, batch),
            out_shardings=(state, everywhere),
            donate_argnums=0,
        ),
    )
