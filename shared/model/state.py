"""The training state: parameters, optimizer state, step number and random key, in one pytree."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from shared.config import Config, without_placement
from shared.model.optimizer import make_optimizer
from shared.model.transformer import Seams, Transformer
from shared.runtime.compilation import fast_compilation
from shared.runtime.keys import random_key


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What one step turns into the next. Made by one twin, it is a valid state of the other."""

    params: Any
    """The `nnx.State` that `nnx.state(model, nnx.Param)` gives; parameters of blocks have a leading dimension L."""
    optimizer: optax.OptState
    step: Array
    """Number of steps done, int32 scalar."""
    key: Array
    """Random key from which each step and example draws its dropout masks."""


def initial_state(config: Config, key: Array) -> TrainState:
    """A fresh state on the default device, a pure function of (config, key).

    It is made on one device and placed afterwards: `jax.random.normal` may differ in the last digits between
    layouts, so drawing each device's share in place would make the twins start apart.
    """
    return jitted_init(without_placement(config))(key)


@functools.cache
def jitted_init(config: Config) -> Any:
    """`initial_state` compiled once for a configuration; eager NNX initialisation takes eight times as long."""

    @functools.partial(jax.jit, compiler_options=fast_compilation())
    def init(key: Array) -> TrainState:
        params_key, state_key = jax.random.split(key)
        params = nnx.state(Transformer(config.model, rngs=nnx.Rngs(params_key)), nnx.Param)
        return TrainState(params, make_optimizer(config).init(params), jnp.int32(0), state_key)

    return init


def abstract_state(config: Config) -> TrainState:
    """Shapes and types of `initial_state`, without making an array."""
    return jitted_init(without_placement(config)).eval_shape(jax.eval_shape(lambda: random_key(0)))


def make_forward(config: Config, seams: Seams = Seams()) -> Callable[..., Array]:
    """The model as a pure function: (params, tokens (B, T), keys (B,) or None) to logits (B, T, V)."""
    structure = nnx.graphdef(nnx.eval_shape(lambda: Transformer(config.model, seams, rngs=nnx.Rngs(0))))

    def forward(params: Any, tokens_BT: Array, keys_B: Array | None = None) -> Array:
        return nnx.merge(structure, seams.gather_outer_params(params))(tokens_BT, keys_B)

    return forward


def live_model(config: Config, state: TrainState) -> Transformer:
    """The state's parameters in an ordinary NNX module, wherever they are placed, to call or to inspect by hand."""
    model = nnx.eval_shape(lambda: Transformer(config.model, rngs=nnx.Rngs(0)))
    nnx.update(model, state.params)
    return model


def example_keys(state: TrainState, rows_B: Array) -> Array:
    """A random key for each example of this step, from its row in the global batch: the same on any device."""
    key = jax.random.fold_in(state.key, state.step)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, rows_B)


def next_state(config: Config, state: TrainState, gradients: optax.Updates) -> TrainState:
    """The state after the optimizer's update with these (already clipped) gradients."""
    updates, optimizer = make_optimizer(config).update(gradients, state.optimizer, state.params)
    return TrainState(optax.apply_updates(state.params, updates), optimizer, state.step + 1, state.key)
