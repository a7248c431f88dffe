"""Digests: of the contents, not of the placement; any flipped bit changes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shared.checkpoint.digest import digest, digests


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint32", "uint8"])
@pytest.mark.parametrize("spec", [P(), P("a"), P(None, "b"), P("b", "a"), P(("a", "b"))])
def test_the_same_on_any_mesh_and_on_the_host(dtype: str, spec: P):
    values = np.random.default_rng(0).integers(0, 99, (8, 16)).astype(jnp.dtype(dtype))
    mesh = jax.make_mesh((2, 4), ("a", "b"), (AxisType.Auto,) * 2)
    placed = jax.device_put(values, NamedSharding(mesh, spec))
    found = digests({"placed": placed, "not": jnp.asarray(values)})
    assert found == {"placed": digest(values), "not": digest(values)}


def test_float64(float64: None):
    values = np.random.default_rng(0).normal(size=(3, 5))
    assert digests({"x": jnp.asarray(values)}) == {"x": digest(values)}
    changed = values.copy()
    changed[1, 1] = np.nextafter(changed[1, 1], 9)
    assert digest(changed) != digest(values)


@settings(max_examples=60)
@given(st.integers(0, 11), st.integers(0, 31))
def test_any_flipped_bit_is_found(place: int, bit: int):
    values = np.arange(12, dtype=np.uint32).reshape(3, 4)
    changed = values.copy()
    changed.flat[place] ^= np.uint32(1 << bit)
    assert digest(changed) != digest(values)


def test_places_count():
    """Exchanged entries and moved zeros are found, which a plain sum would not see."""
    assert digest(np.array([1, 2, 0], np.float32)) != digest(np.array([2, 1, 0], np.float32))
    assert digest(np.array([1, 0, 0], np.float32)) != digest(np.array([0, 0, 1], np.float32))


def test_scalars_and_empty_arrays():
    assert len(digest(np.float32(1).reshape(()))) == 16
    assert digests({"x": jnp.int32(3)}) == {"x": digest(np.int32(3).reshape(()))}
    assert digest(np.zeros((0, 3), np.float32)) == "0" * 16
