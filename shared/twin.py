"""The contract of a twin: what both packages build, and all that anything outside them knows of either."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array
from jax.sharding import Mesh

from shared.config import Config
from shared.data.batches import Batch
from shared.model.state import TrainState, abstract_state, initial_state
from shared.placement.layout import Layout, abstract_batch
from shared.placement.placing import place, place_batch


@dataclass(frozen=True)
class Plan:
    """What the functions of a step are given besides state and batch."""

    config: Config
    layout: Layout
    forward: Callable[..., Array]
    """The model as a function: (params, tokens, keys) to logits."""
    decode: Callable[..., Any]
    """The model with a KV cache: (params, cache, tokens, start) to logits and cache (shared/model/decoding.py)."""
    summed_loss: Callable[[Array, Array, Array], Array]
    """(logits, targets, weights) to the sum over tokens of weight times cross-entropy, in nats."""


@dataclass(frozen=True, eq=False)
class Twin:
    """One training step on one mesh. The jitted functions can also be lowered: `twin.train_step.lower(...)`."""

    plan: Plan
    logits: Callable[..., Any]
    """(state, tokens (B, T)) to logits (B, T, V), without dropout."""
    decode: Callable[..., Any]
    """(state, cache, tokens (B, S), start) to logits (B, S, V) of S further tokens and the cache with them in it. The
    old cache is donated."""
    loss_and_grads: Callable[..., Any]
    """(state, batch) to loss (nats per counted token), gradients (as the parameters), number of counted tokens."""
    train_step: Callable[..., Any]
    """(state, batch) to the next state and metrics: loss, perplexity, gradient_norm, tokens. The old state is
    donated: its arrays are gone afterwards."""

    @property
    def mesh(self) -> Mesh:
        return self.plan.layout.mesh

    def init(self, key: Array) -> TrainState:
        """The state of step 0, placed; equal in both twins and on any mesh."""
        return self.place_state(initial_state(self.plan.config, key))

    def place_state(self, state: TrainState) -> TrainState:
        """A copy of a state that lives anywhere, placed for this twin."""
        return place(self.plan.layout, state, self.plan.layout.state)

    def place_batch(self, batch: Batch) -> Batch:
        """A global batch, or the rows of it that this process needs (`local_rows`), sharded over the devices."""
        return place_batch(self.plan.layout, batch, self.plan.config.batch)

    def shapes(self) -> tuple[TrainState, Batch]:
        """State and batch as shapes with shardings, to lower a function for a mesh whose devices do not exist."""
        layout, config = self.plan.layout, self.plan.config
        return (
            layout.shapes(abstract_state(config), layout.state),
            layout.shapes(abstract_batch(config), layout.batch),
        )


def step_metrics(loss: Array, gradient_norm: Array, tokens: Array) -> dict[str, Array]:
    """The metrics of one step, scalars. Perplexity is exp of the global mean, not a mean of devices' exps."""
    return {
        "loss": loss,
        "perplexity": jax.numpy.exp(loss),
        "gradient_norm": gradient_norm,
        "tokens": tokens,
    }
