"""Steps whose model is an object: NNX, changed in place, and equinox."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tests.twinstep.equivalence.steps.kinds import BATCH, Kind, Mistake


class Network(nnx.Module):
    """Two layers, dropout, and a counter of calls."""

    def __init__(self, rngs: nnx.Rngs):
        self.hidden, self.out = nnx.Linear(6, 5, rngs=rngs), nnx.Linear(5, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.out(self.dropout(jnp.tanh(self.hidden(x))))


def in_place(returns: bool) -> Callable[[Mistake], Callable[..., Any]]:
    """The NNX tutorial's step: model and optimizer are changed, and perhaps nothing is returned."""

    def build(mistake: Mistake) -> Callable[..., Any]:
        @nnx.jit
        def step(model: Network, optimizer: nnx.Optimizer, batch: Any) -> Any:
            given = mistake.batch(batch)
            value, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(given["x"]) - given["y"]) ** 2))(model)
            optimizer.update(model, mistake.gradients(gradients))
            return value if returns else None

        return step

    return build


def in_place_arguments() -> tuple[Any, ...]:
    model = Network(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), BATCH


def equinox_step(mistake: Mistake) -> Callable[..., Any]:
    """An equinox module, which has functions among its leaves."""

    @eqx.filter_jit
    def step(model: Any, batch: Any) -> Any:
        batch = mistake.batch(batch)
        value, gradients = eqx.filter_value_and_grad(
            lambda model: jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)
        )(model)
        updates = jax.tree.map(lambda leaf: -0.1 * leaf, mistake.gradients(gradients))
        return eqx.apply_updates(model, updates), value

    return step


def equinox_arguments() -> tuple[Any, ...]:
    return eqx.nn.MLP(6, 3, 5, 1, key=jax.random.key(0)), BATCH


KINDS = (
    Kind("NNX in place", in_place(returns=False), in_place_arguments),
    Kind("NNX in place with a loss", in_place(returns=True), in_place_arguments),
    Kind("equinox", equinox_step, equinox_arguments),
)
