"""The training step on one device: no mesh, no placement, nothing to send. The reference for both twins.

It shares the model, the loss and the optimizer with the twins, and writes out the rest, so that it can disagree.
Compiled functions take arrays from anywhere and return theirs on the default device.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from shared.config import Config, validate
from shared.data.batches import Batch
from shared.model.loss import summed_loss
from shared.model.optimizer import clip
from shared.model.state import TrainState, example_keys, make_forward, next_state
from shared.model.transformer import Seams


class SingleDevice(NamedTuple):
    """The functions of a twin (shared/twin.py), on one device."""

    logits: Any
    loss_and_grads: Any
    train_step: Any


def build(config: Config, seams: Seams = Seams()) -> SingleDevice:
    """The step of this configuration. Unlike the twins' it donates nothing. Raises ValueError as the twins do.

    seams: for experiments with mistakes; the truth has none.
    """
    validate(config)
    forward = make_forward(config, seams)

    def logits(state: TrainState, tokens_BT: Array) -> Array:
        return forward(state.params, tokens_BT)

    def loss_and_grads(state: TrainState, batch: Batch) -> tuple[Array, optax.Updates, Array]:
        tokens = jnp.sum(jnp.asarray(batch.weights, jnp.promote_types(config.model.dtype, jnp.float32)))

        def mean_loss(params: optax.Params) -> Array:
            logits_BTV = forward(params, batch.tokens, example_keys(state, batch.rows))
            return summed_loss(logits_BTV, batch.targets, batch.weights) / tokens

        return *jax.value_and_grad(mean_loss)(state.params), tokens

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        loss, gradients, tokens = loss_and_grads(state, batch)
        norm = optax.tree.norm(gradients)
        state = next_state(config, state, clip(gradients, norm, config.optimizer.clip))
        return state, {"loss": loss, "perplexity": jnp.exp(loss), "gradient_norm": norm, "tokens": tokens}

    return SingleDevice(jax.jit(logits), jax.jit(loss_and_grads), jax.jit(train_step))
