"""Schedule, clipping, decay and loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shared.model.loss import counted_tokens, summed_loss
from shared.model.optimizer import clip, is_kernel, schedule
from shared.model.state import initial_state, next_state
from tests.small import small_config
from twinstep.tree import named_leaves


def test_the_schedule_rises_and_falls():
    config = small_config(steps=100, warmup=10, learning_rate=1.0)
    rates = np.array([schedule(config)(step) for step in range(101)])
    assert rates[0] == pytest.approx(1 / 11)
    assert (np.diff(rates[:11]) > 0).all()
    assert rates[10] == pytest.approx(1)
    assert (np.diff(rates[10:]) <= 0).all()
    assert rates[100] == pytest.approx(0.1)


def test_a_constant_schedule_without_warmup():
    config = small_config(schedule="constant", warmup=0, learning_rate=0.5)
    assert [float(schedule(config)(step)) for step in (0, 1, 1000)] == [0.5] * 3


@pytest.mark.parametrize(
    ("norm", "limit", "scale"), [(5.0, 1.0, 0.2), (10.0, 2.0, 0.2), (5.0, 10.0, 1.0), (5.0, 0.0, 1.0), (0.0, 1.0, 1.0)]
)
def test_clipping(norm: float, limit: float, scale: float):
    gradients = {"a": jnp.array([3.0, 4.0]) * norm / 5}
    np.testing.assert_allclose(clip(gradients, jnp.float32(norm), limit)["a"], scale * gradients["a"], rtol=1e-6)


def test_sgd_subtracts_the_gradient():
    """What the proof of the update rests on: with learning rate 1, the update is the gradient."""
    config = small_config(optimizer="sgd", learning_rate=1.0, schedule="constant")
    state = initial_state(config, jax.random.key(0))
    gradients = jax.tree.map(jnp.ones_like, state.params)
    after = next_state(config, state, gradients)
    for before, now in zip(jax.tree.leaves(state.params), jax.tree.leaves(after.params), strict=True):
        np.testing.assert_array_equal(now, before - 1)
    assert after.step == 1


def test_only_weight_matrices_decay():
    config = small_config(learning_rate=0.1, weight_decay=1.0, schedule="constant")
    state = initial_state(config, jax.random.key(0))
    after = next_state(config, state, jax.tree.map(jnp.zeros_like, state.params))
    moved = {
        name
        for (name, before), now in zip(named_leaves(state.params).items(), jax.tree.leaves(after.params), strict=True)
        if not np.array_equal(before, now)
    }
    assert moved == {name for name in named_leaves(state.params) if name.endswith("kernel")}
    assert sum(jax.tree.leaves(is_kernel(state.params))) == 7


def test_the_loss_is_a_weighted_sum_of_cross_entropies():
    logits = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)
    targets = np.array([[0, 1, 2], [3, 4, 0]])
    weights = np.array([[1, 0, 0.5], [0, 2, 1]], np.float32)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = -(weights * np.log(np.take_along_axis(probabilities, targets[..., None], -1)[..., 0])).sum()
    assert float(summed_loss(logits, targets, weights)) == pytest.approx(expected, rel=1e-6)
    assert float(counted_tokens(weights, "bfloat16")) == 4.5
    assert summed_loss(jnp.asarray(logits, jnp.bfloat16), targets, weights).dtype == jnp.float32


@pytest.mark.parametrize("kind", ["cosine", "constant"])
@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (0, 20), (1, 20), (7, 20), (20, 20), (30, 20)])
def test_the_schedule_is_that_of_saved_runs(kind: str, warmup: int, steps: int):
    """At every step, also beyond the last and in a run that ends during its warm-up: written out, not from optax."""
    peak = 3e-3
    rate = schedule(small_config(schedule=kind, warmup=warmup, steps=steps, learning_rate=peak))
    for step in range(steps + 5):
        if step < warmup:
            expected = peak / (warmup + 1) + (peak - peak / (warmup + 1)) * step / warmup
        elif kind == "constant":
            expected = peak
        else:
            done = min((step - warmup) / max(steps - warmup, 1), 1)
            expected = peak * (0.1 + 0.9 * (1 + np.cos(np.pi * done)) / 2)
        assert float(rate(step)) == pytest.approx(expected, rel=1e-6), step
    assert float(rate(0)) > 0
