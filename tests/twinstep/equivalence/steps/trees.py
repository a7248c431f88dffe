"""Steps whose state is a plain tree: dictionaries, optax, linen."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from tests.twinstep.equivalence.steps.kinds import BATCH, RANDOM, Kind, Mistake


def weights(*shapes: tuple[int, ...], dtype: Any = jnp.float32) -> dict[str, Any]:
    return {
        f"layer_{number}": {
            "w": jnp.asarray(RANDOM.normal(size=shape) / shape[0] ** 0.5, dtype),
            "b": jnp.zeros(shape[-1:], dtype),
        }
        for number, shape in enumerate(shapes)
    }


PARAMS = weights((6, 5), (5, 3))


def predict(params: Any, x: Any) -> Any:
    hidden = jnp.tanh(x @ params["layer_0"]["w"] + params["layer_0"]["b"])
    return hidden @ params["layer_1"]["w"] + params["layer_1"]["b"]


def loss(params: Any, batch: Any) -> Any:
    return jnp.mean((predict(params, batch["x"]) - batch["y"]) ** 2)


def dictionary(mistake: Mistake) -> Callable[..., Any]:
    """Haiku's manner: a dictionary of dictionaries, a key for the dropout in it that is split, and a step number."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, batch: Any) -> Any:
        key, used = jax.random.split(state["rng"])
        batch = mistake.batch(batch)

        def dropped(params: Any) -> Any:
            kept = jax.random.bernoulli(used, 0.5, batch["x"].shape)
            return loss(params, {**batch, "x": jnp.where(kept, batch["x"] * 2, 0)})

        value, gradients = jax.value_and_grad(dropped)(state["params"])
        gradients = mistake.gradients(gradients)
        params = jax.tree.map(lambda w, g: w - 0.1 * g, state["params"], gradients)
        return {"params": params, "rng": key, "step": state["step"] + 1}, {"loss": value}

    return step


def linen(mistake: Mistake) -> Callable[..., Any]:
    """Flax linen's TrainState, with an auxiliary output."""

    @jax.jit
    def step(state: TrainState, batch: Any) -> Any:
        batch = mistake.batch(batch)

        def loss_fn(params: Any) -> Any:
            logits = state.apply_fn({"params": params}, batch["x"])
            return jnp.mean(optax.squared_error(logits, batch["y"])), {"logits": logits}

        (value, aux), gradients = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=mistake.gradients(gradients)), {"loss": value, **aux}

    return step


def linen_arguments() -> tuple[Any, ...]:
    model = nn.Sequential([nn.Dense(5), nn.gelu, nn.LayerNorm(), nn.Dense(3)])
    params = model.init(jax.random.key(0), BATCH["x"])["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3)), BATCH


def with_optax(transform: Any, *, plateau: bool = False) -> tuple[Callable[[Mistake], Any], Callable[[], Any]]:
    """Parameters and the optimizer's state side by side."""

    def build(mistake: Mistake) -> Callable[..., Any]:
        @jax.jit
        def step(params: Any, state: Any, batch: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(params, mistake.batch(batch))
            given = {"value": value} if plateau else {}
            updates, state = transform.update(mistake.gradients(gradients), state, params, **given)
            return optax.apply_updates(params, updates), state, value

        return step

    return build, lambda: (PARAMS, transform.init(PARAMS), BATCH)


def only_weights(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, leaf: path[-1].key == "w", params)


def averaged(mistake: Mistake) -> Callable[..., Any]:
    """An exponential moving average of the parameters in the state, and a Python float in the result: not jitted."""
    gradient = jax.jit(jax.value_and_grad(loss))

    def step(state: Any, batch: Any) -> Any:
        value, gradients = gradient(state["params"], mistake.batch(batch))
        gradients = mistake.gradients(gradients)
        params = jax.tree.map(lambda w, g: w - 0.1 * g, state["params"], gradients)
        ema = optax.incremental_update(params, state["ema"], 0.01)
        return {"params": params, "ema": ema}, {"loss": float(value), "step": 1}

    return step


def static(mistake: Mistake) -> Callable[..., Any]:
    """Static arguments: a string, and a Python float that is a constant of the program."""

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def step(mode: str, rate: float, params: Any, batch: Any) -> Any:
        assert mode == "train"
        value, gradients = jax.value_and_grad(loss)(params, mistake.batch(batch))
        return jax.tree.map(lambda w, g: w - rate * g, params, mistake.gradients(gradients)), {"loss": value}

    return step


def in_bfloat16(mistake: Mistake) -> Callable[..., Any]:
    """Parameters in bfloat16; the gradients are returned beside the loss, which is cast to float32."""

    @jax.jit
    def step(params: Any, batch: Any) -> Any:
        batch = mistake.batch(batch)

        def loss_fn(params: Any) -> Any:
            error = predict(params, batch["x"].astype(jnp.bfloat16)).astype(jnp.float32) - batch["y"]
            return jnp.mean(error**2)

        value, gradients = jax.value_and_grad(loss_fn)(params)
        return {"loss": value, "gradients": mistake.gradients(gradients)}

    return step


def tied(mistake: Mistake) -> Callable[..., Any]:
    """One embedding for input and output, with a key bias whose true gradient is zero."""

    @jax.jit
    def step(params: Any, batch: Any) -> Any:
        tokens = mistake.batch(batch)["x"]

        def loss_fn(params: Any) -> Any:
            hidden = params["embedding"][tokens]
            query, key = hidden @ params["query"], hidden @ params["key"] + params["key_bias"]
            scores = jax.nn.softmax(query @ key.swapaxes(-1, -2))
            logits = jnp.tanh(scores @ hidden) @ params["embedding"].T
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]))

        value, gradients = jax.value_and_grad(loss_fn)(params)
        return {"loss": value, "gradients": mistake.gradients(gradients)}

    return step


def tied_arguments() -> tuple[Any, ...]:
    params = {name: RANDOM.normal(size=shape) for name, shape in (("embedding", (11, 6)), ("query", (6, 6)))}
    params |= {"key": RANDOM.normal(size=(6, 6)), "key_bias": RANDOM.normal(size=6)}
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params), {"x": RANDOM.integers(0, 11, (16, 8))}


KINDS = (
    Kind(
        "a dictionary with a key", dictionary, lambda: ({"params": PARAMS, "rng": jax.random.key(1), "step": 0}, BATCH)
    ),
    Kind("linen TrainState", linen, linen_arguments),
    # optax's own cond over float32 and float64 branches
    Kind("MultiSteps", *with_optax(optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2)), float64=False),
    Kind(
        "masked", *with_optax(optax.chain(optax.masked(optax.add_decayed_weights(0.1), only_weights), optax.sgd(0.1)))
    ),
    Kind(
        "reduce_on_plateau",
        *with_optax(optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)), plateau=True),
    ),
    Kind("an average of parameters", averaged, lambda: ({"params": PARAMS, "ema": PARAMS}, BATCH)),
    Kind("static arguments", static, lambda: ("train", 0.1, PARAMS, BATCH)),
    Kind("bfloat16", in_bfloat16, lambda: (weights((6, 5), (5, 3), dtype=jnp.bfloat16), BATCH), float64=False),
    Kind("a tied embedding", tied, tied_arguments),
)
