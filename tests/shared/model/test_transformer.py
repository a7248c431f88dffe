"""The transformer and its parts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shared.model.state import abstract_state, example_keys, initial_state, live_model, make_forward
from shared.model.transformer import Seams, causal_attention, dropout, token_keys
from tests.small import small_config

KEY = jax.random.key(0)


def attention_in_numpy(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Softmax attention in the longest type that numpy has, written as the formula reads."""
    q, k, v = (x.astype(np.longdouble) for x in (q, k, v))
    out = np.zeros_like(q)
    for b, t, h in np.ndindex(q.shape[:3]):
        scores = np.array([q[b, t, h] @ k[b, s, h] for s in range(t + 1)]) / np.sqrt(np.longdouble(q.shape[-1]))
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights @ v[b, : t + 1, h] / weights.sum()
    return out


@pytest.mark.parametrize(("dtype", "allowed"), [("float64", 1e-15), ("float32", 1e-6), ("bfloat16", 3e-2)])
def test_attention_is_exact_in_its_type(dtype: str, allowed: float, float64: None):
    """A float32 anywhere inside (jax.nn's attention has one) would show as 1e-8 in float64."""
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 9, 3, 4))
    found = causal_attention(*(jnp.asarray(x, dtype) for x in (q, k, v)))
    assert found.dtype == dtype
    exact = attention_in_numpy(*(np.asarray(jnp.asarray(x, dtype), np.float64) for x in (q, k, v)))
    assert np.linalg.norm(np.asarray(found, np.float64) - exact) <= allowed * np.linalg.norm(exact)


def test_large_scores_do_not_overflow():
    x = jnp.full((1, 4, 1, 2), 300.0)
    assert jnp.isfinite(causal_attention(x, x, x)).all()


def test_causality_by_gradients():
    """The logits at a position depend on every token up to it and on none after it."""
    config = small_config()
    model = live_model(config, initial_state(config, KEY))
    tokens_BT = jax.random.randint(KEY, (1, config.model.seq_len), 0, 256)
    embedded_BTD = model.token_embedding(tokens_BT)
    structure, parameters = nnx.split(model)

    @jax.jit
    def gradient(embedded_BTD: jax.Array, position: int) -> jax.Array:
        def logits(embedded_BTD: jax.Array) -> jax.Array:
            model = nnx.merge(structure, parameters)
            model.token_embedding = lambda tokens: embedded_BTD
            return model(tokens_BT)[0, position].sum()

        return jax.grad(logits)(embedded_BTD)

    for position in (0, 3, config.model.seq_len - 1):
        sizes_T = jnp.abs(gradient(embedded_BTD, position)[0]).max(axis=-1)
        assert (sizes_T[: position + 1] > 0).all()
        assert (sizes_T[position + 1 :] == 0).all()


def test_layers_in_a_loop_or_laid_out_are_the_same_function():
    config = small_config(layers=3)
    state = initial_state(config, KEY)
    tokens = jnp.arange(16).reshape(2, 8)
    outputs = []
    for unroll, remat in ((1, False), (2, True), (3, False)):
        model = dataclasses.replace(config.model, unroll=unroll, remat=remat)
        outputs.append(make_forward(dataclasses.replace(config, model=model))(state.params, tokens))
    for other in outputs[1:]:
        np.testing.assert_allclose(other, outputs[0], rtol=1e-5, atol=1e-6)


def test_a_deep_model_compiles_like_a_shallow_one():
    """The program does not grow with the number of layers beyond those of one turn of the loop."""
    sizes = []
    for layers in (8, 64):
        config = small_config(layers=layers, unroll=4)
        state = abstract_state(config)
        forward = jax.jit(make_forward(config))
        sizes.append(len(forward.lower(state.params, jax.ShapeDtypeStruct((1, 8), jnp.int32)).as_text()))
    assert sizes[1] < 1.05 * sizes[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_types_of_computation_and_parameters(dtype: str):
    config = small_config(dtype=dtype)
    state = initial_state(config, KEY)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    assert make_forward(config)(state.params, jnp.zeros((1, 8), jnp.int32)).dtype == dtype


def test_dropout_masks_belong_to_tokens():
    """Any part of the batch, and of the sequence, has the masks that it has in the whole; steps have their own."""
    config = small_config(dropout=0.5)
    state = initial_state(config, KEY)
    examples = example_keys(state, jnp.arange(6, dtype=jnp.uint32))
    x = jnp.ones((6, 8, 16))
    whole = dropout(x, 0.5, token_keys(examples, jnp.arange(8)))
    part = token_keys(examples[2:4], 4 + jnp.arange(4))
    np.testing.assert_array_equal(dropout(x[2:4, 4:], 0.5, part), whole[2:4, 4:])
    assert not (whole[0] == whole[1]).all()
    assert not (whole[:, 0] == whole[:, 1]).all()
    later = example_keys(dataclasses.replace(state, step=state.step + 1), jnp.arange(6, dtype=jnp.uint32))
    assert not (dropout(x, 0.5, token_keys(later, jnp.arange(8))) == whole).all()
    assert abs(float(whole.mean()) - 1) < 0.1
    np.testing.assert_array_equal(dropout(x, 0.5, None), x)


def test_dropout_changes_the_logits_only_with_keys():
    config = small_config(dropout=0.3)
    state = initial_state(config, KEY)
    tokens = jnp.zeros((2, 8), jnp.int32)
    forward = make_forward(config)
    keys = example_keys(state, jnp.arange(2, dtype=jnp.uint32))
    assert not np.allclose(forward(state.params, tokens, keys), forward(state.params, tokens))


def test_every_seam_is_called():
    """Each seam that a strategy may fill is one that the model really uses."""
    config = small_config()
    called = set()

    def noted(name: str):
        plain = getattr(Seams(), name)

        def seam(*args, **kwargs):
            called.add(name)
            return plain(*args, **kwargs)

        return seam

    names = {field.name for field in dataclasses.fields(Seams)}
    make_forward(config, Seams(**{name: noted(name) for name in names}))(
        initial_state(config, KEY).params, jnp.zeros((1, 8), jnp.int32)
    )
    assert called == names
