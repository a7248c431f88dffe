"""Correct pairs are equal: the same computation in another order, on random numbers, in float32 and bfloat16."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twinstep import compare

SEEDS = 25


def loss(params: Any, x: Any) -> Any:
    hidden = jnp.tanh(x @ params["a"])
    scores = jax.nn.softmax((hidden @ params["q"]) @ (hidden @ params["k"] + params["key_bias"]).swapaxes(-1, -2))
    return jnp.mean(jnp.square((scores @ hidden) @ params["b"]).astype(jnp.float32))


def gradients(params: Any, x: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(params, x)
    return {"loss": value, "gradients": grads}


def in_parts(params: Any, x: Any) -> Any:
    """Gradients accumulated over four parts of the batch."""
    parts = [gradients(params, part) for part in jnp.split(x, 4)]
    return jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]) / 4, *parts)


def rows_turned(params: Any, x: Any) -> Any:
    return gradients(params, x[::-1])


def padded(params: Any, x: Any) -> Any:
    """Products with zeros beside them, which are summed in blocks of another size."""
    wide = {**params, "a": jnp.pad(params["a"], ((0, 9), (0, 0)))}
    found = gradients(wide, jnp.pad(x, ((0, 0), (0, 0), (0, 9))))
    found["gradients"]["a"] = found["gradients"]["a"][:-9]
    return found


def factored(params: Any, x: Any) -> Any:
    """The product of two weights first."""
    changed = jax.value_and_grad(lambda params: loss(params, x.swapaxes(0, 1).swapaxes(0, 1)) * 3)(params)
    return {"loss": changed[0] / 3, "gradients": jax.tree.map(lambda leaf: leaf / 3, changed[1])}


PAIRS = {"in parts": in_parts, "rows turned": rows_turned, "padded": padded, "scaled and back": factored}


def drawn(seed: int, dtype: Any, width: int) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    shapes = {"a": (7, width), "q": (width, width), "k": (width, width), "key_bias": (width,), "b": (width, 3)}
    params = {name: random.normal(size=shape) / shape[0] ** 0.5 for name, shape in shapes.items()}
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), (params, random.normal(size=(8, 6, 7))))


def alarms(dtype: Any, seeds: int) -> Iterator[tuple[str, bool, str]]:
    """Name of the pair, whether its own type and float64 found it equal, and the report."""
    reference = jax.jit(gradients)
    for name, function in PAIRS.items():
        candidate: Callable[..., Any] = jax.jit(function)
        for seed in range(seeds):
            report = compare(reference, candidate, *drawn(seed, dtype, 16))
            yield name, report.equal, str(report)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seeds", [1, pytest.param(SEEDS, marks=pytest.mark.slow)])
def test_correct_pairs_raise_no_alarm(dtype: str, seeds: int):
    wrong = [(name, text) for name, equal, text in alarms(jnp.dtype(dtype), seeds) if not equal]
    assert not wrong, wrong[0]
