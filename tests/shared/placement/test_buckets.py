"""Buckets: what is joined comes apart as it was, in as few arrays as the size allows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import TWINS
from shared.placement.buckets import assign, join, split
from shared.placement.layout import make_mesh
from tests.small import small_config
from twinstep.communication.compiled import collectives, compile_readable

SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=8)


@settings(max_examples=50, deadline=None)
@given(SHAPES, st.lists(st.sampled_from(["float32", "bfloat16"]), min_size=8, max_size=8), st.integers(1, 300))
def test_a_roundtrip_changes_nothing(shapes: list[list[int]], dtypes: list[str], size: int):
    leaves = [
        np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(jnp.dtype(dtype))
        for shape, dtype in zip(shapes, dtypes, strict=False)
    ]
    tree = {"some": leaves[:2], "others": leaves[2:]}
    buckets = join(tree, size)
    back = split(buckets, tree, size)
    for expected, found in zip(jax.tree.leaves(tree), jax.tree.leaves(back), strict=True):
        np.testing.assert_array_equal(np.asarray(found), expected, strict=True)
    for bucket, numbers in zip(buckets, assign(jax.tree.leaves(tree), size), strict=True):
        assert bucket.ndim == 1
        assert len(numbers) == 1 or bucket.size * bucket.dtype.itemsize <= size


@pytest.mark.parametrize(("size", "arrays"), [(0, 23), (1, 23), (10_000, 6), (2**22, 1)])
def test_the_compiled_step_sends_so_many_arrays(size: int, arrays: int):
    """21 gradients, the loss and the count: each by itself, in small buckets (some gradients fill one), or in one."""
    config = small_config(bucket_bytes=size)
    twin = TWINS["explicit"](config, make_mesh(config.strategy, 4))
    found = collectives(compile_readable(twin.train_step, *twin.shapes()), twin.mesh)
    assert sum(collective.arrays for collective in found) == arrays
    assert len(found) == 1


def test_a_negative_size(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ValueError, match="bucket_bytes is -1; give a size in bytes, or 0 for no buckets"):
        TWINS["explicit"](small_config(bucket_bytes=-1), make_mesh("data_parallel", 1))
