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
from shared.data import Batch
from shared.decoding import Cache, make_extend
from shared.loss import counted_tokens, divided
from shared.model import Seams
from shared.optimizer import clip
from shared.placement import Layout, layout
from shared.state import TrainState, example_keys, make_forward
from shared.twin import Plan, Twin, metrics_of


def logits(plan: Plan, state: TrainState, tokens_BT: Array) -> Array:
    """Logits (B, T, V) of the global batch, without dropout."""
    return plan.forward(state.params, tokens_BT)


def extend(plan: Plan, state: TrainState, cache: Cache, tokens_BS: Array, start: Array) -> tuple[Array, Cache]:
    """Logits (B, S, V) of further tokens of the global batch, and the cache with them in it."""
    return plan.extend(state.params, cache, tokens_BS, start)


def loss_and_grads(plan: Plan, state: TrainState, batch: Batch) -> tuple[Array, optax.Updates, Array]:
    """Mean loss over the global batch, its gradients, and the number of counted tokens."""

    def global_sum(params: optax.Params, batch: Batch) -> Array:
        logits_BTV = plan.forward(params, batch.tokens, example_keys(state, batch.rows))
        return tensor_parallel.summed_loss(plan, logits_BTV, batch.targets, batch.weights)

    sums = accumulation.accumulate(plan, jax.value_and_grad(global_sum), state.params, batch)
    tokens = counted_tokens(batch.weights, plan.config.model.dtype)
    sums, tokens = data_parallel.average(plan, (sums, tokens))
    loss, gradients = divided(sums, tokens)
    return loss, gradients, tokens


def train_step(plan: Plan, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
    """The next state and the metrics of this step."""
    loss, gradients, tokens = loss_and_grads(plan, state, batch)
    norm = fsdp.norm(plan, gradients)
    gradients = clip(gradients, norm, plan.config.optimizer.clip)
    return fsdp.update(plan, state, gradients), metrics_of(loss, norm, tokens)


def seams(layout: Layout) -> Seams:
    """What each strategy has to say inside the model; nothing, where the mesh lacks its axis."""
    return Seams(
        attention=context_parallel.attention(layout),
        heads=tensor_parallel.heads(layout),
        reduce=tensor_parallel.reduce(layout),
        enter=tensor_parallel.enter(layout),
        hidden=tensor_parallel.hidden(layout),
        stream=fsdp.stream(layout),
        outer=fsdp.gather(layout, layout.outer),
        layers=fsdp.gather(layout, layout.block),
        positions=context_parallel.positions(layout),
    )


def build(config: Config, mesh: Mesh) -> Twin:
    """The step of this configuration on this mesh. Raises ValueError for sizes that do not divide."""
    places = layout(config, mesh)
    extending = make_extend(config, seams(places.with_whole_sequences()))
    plan = Plan(config, places, make_forward(config, seams(places)), extending)
    state, batch, cache, everywhere = map(places.shardings, (places.state, places.batch, places.cache, P()))
    logits_BTV, logits_BSV = map(places.shardings, (places.logits, places.with_whole_sequences().logits))
    return Twin(
        plan,
        logits=jax.jit(partial(logits, plan), in_shardings=(state, batch.tokens), out_shardings=logits_BTV),
        extend=jax.jit(
            partial(extend, plan),
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
