"""A legacy chapter: the data-parallel step as it was written for `jax.pmap`, before `shard_map` and `NamedSharding`.

`pmap` runs a function once per device, like `shard_map`, but has no placement: an array for the devices is one with a
leading dimension of their number, also where all hold the same. docs/pmap.md says how to move on from it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from shared.config import Config, check, validate
from shared.data.batches import Batch
from shared.model.loss import counted_tokens, summed_loss, sums_to_means
from shared.model.optimizer import clip
from shared.model.state import TrainState, example_keys, make_forward, next_state
from shared.twin import step_metrics


class Pmapped(NamedTuple):
    """The functions of a step under `pmap`. What they take and return has a leading dimension N, of the devices."""

    logits: Any
    loss_and_grads: Any
    train_step: Any
    replicate: Callable[[Any], Any]
    """A tree, N times."""
    deal: Callable[[Any], Any]
    """A tree of rows (B, ...) as (N, b, ...)."""


def loss_and_grads(config: Config, forward: Any, state: TrainState, batch: Batch) -> tuple[Array, optax.Updates, Array]:
    """Mean loss over the global batch, its gradients, and the number of counted tokens: equal on every device.

    Every device has parameters of its own here, so that gradients are local without a `pcast`.
    """
    keys_b = example_keys(state, batch.rows)

    def local_sum(params: optax.Params) -> Array:
        return summed_loss(forward(params, batch.tokens, keys_b), batch.targets, batch.weights)

    tokens = counted_tokens(batch.weights, config.model.dtype)
    sums, tokens = lax.psum((jax.value_and_grad(local_sum)(state.params), tokens), "data")
    loss, gradients = sums_to_means(sums, tokens)
    return loss, gradients, tokens


def train_step(config: Config, forward: Any, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
    """The next state and the metrics of this step: every device makes the same update of its copy."""
    loss, gradients, tokens = loss_and_grads(config, forward, state, batch)
    norm = optax.tree.norm(gradients)
    gradients = clip(gradients, norm, config.optimizer.clip)
    return next_state(config, state, gradients), step_metrics(loss, norm, tokens)


def build(config: Config, devices: Sequence[jax.Device]) -> Pmapped:
    """The step of this configuration on these devices. Raises ValueError for a batch that they do not divide."""
    validate(config)
    count = len(devices)
    check(config.batch % count == 0, f"batch={config.batch} cannot be split evenly over {count} devices")
    forward = make_forward(config)
    per_device = partial(jax.pmap, axis_name="data", devices=list(devices))
    return Pmapped(
        logits=per_device(lambda state, tokens_bT: forward(state.params, tokens_bT)),
        loss_and_grads=per_device(partial(loss_and_grads, config, forward)),
        train_step=per_device(partial(train_step, config, forward), donate_argnums=0),
        replicate=lambda tree: jax.tree.map(lambda leaf: jnp.stack([leaf] * count), tree),
        deal=lambda tree: jax.tree.map(lambda leaf: np.reshape(leaf, (count, -1, *np.shape(leaf)[1:])), tree),
    )
