"""Buckets: what is joined comes apart as it was, in as few arrays as the size allows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from bench import TWINS
from explicit_shardmap import data_parallel
from shared.placement.buckets import assign, in_buckets
from shared.placement.mesh import make_mesh
from tests.small import small_config
from twinstep import collectives

SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=8)
EIGHT = {"min_size": 8, "max_size": 8}


@settings(max_examples=50, deadline=None)
@given(
    SHAPES,
    st.lists(st.sampled_from(["float32", "bfloat16"]), **EIGHT),
    st.lists(st.sampled_from([(), ("data",), ("data", "fsdp")]), **EIGHT),
    st.lists(st.sampled_from([P(), P("tensor")]), **EIGHT),
    st.integers(0, 300),
)
def test_every_leaf_is_reduced_over_its_own_axes(shapes: list, dtypes: list, axes: list, specs: list, size: int):
    """The reduction here multiplies by the number of axes, so that a leaf in a wrong bucket shows."""
    leaves = [
        np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(jnp.dtype(dtype))
        for shape, dtype in zip(shapes, dtypes, strict=False)
    ]
    count, calls = len(leaves), []

    def reduce(arrays: list, over: tuple[str, ...]) -> list:
        calls.append(arrays)
        return [array * (1 + len(over)) for array in arrays]

    def tree(values: list) -> dict:
        return {"some": values[:2], "others": values[2:count]}

    found = in_buckets(reduce, tree(leaves), tree(axes[:count]), tree(specs[:count]), size)
    ordered = [*zip(leaves[2:], axes[2:], strict=False), *zip(leaves[:2], axes[:2], strict=False)]
    for (leaf, over), got in zip(ordered, jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(np.asarray(got), leaf * (1 + len(over) if over else 1), strict=True)
    for arrays in calls:
        assert len({array.dtype for array in arrays}) == 1
        assert size > 0 or all(isinstance(array, np.ndarray) for array in arrays)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20), st.integers(1, 500))
def test_buckets_are_full_and_no_fuller(sizes: list[int], limit: int):
    leaves = [np.zeros(size, np.uint8) for size in sizes]
    buckets = assign(leaves, list(range(len(leaves))), limit)
    assert [number for bucket in buckets for number in bucket] == list(range(len(leaves)))
    filled = [sum(sizes[number] for number in bucket) for bucket in buckets]
    assert all(total <= limit or len(bucket) == 1 for total, bucket in zip(filled, buckets, strict=True))
    following = [sizes[bucket[0]] for bucket in buckets[1:]]
    assert all(total + size > limit for total, size in zip(filled, following, strict=False))


@pytest.mark.parametrize(("size", "arrays"), [(0, 23), (1, 23), (10_000, 6), (2**22, 1)])
def test_the_compiled_step_sends_so_many_arrays(size: int, arrays: int):
    """21 gradients, the loss and the count: each by itself, in small buckets (some gradients fill one), or in one."""
    config = small_config(bucket_bytes=size)
    twin = TWINS["explicit"](config, make_mesh(config.strategy, 4))
    found = collectives(twin.train_step, *twin.shapes(), mesh=twin.mesh)
    assert sum(collective.arrays for collective in found) == arrays
    assert len(found) == 1


def test_buckets_change_no_bit():
    """Each number is summed over the devices in the same order, wherever it stands in a message."""
    mesh = make_mesh("data_parallel", 8)
    rng, found = np.random.default_rng(0), []
    params = TWINS["explicit"](small_config(), mesh).shapes()[0].params
    local = jax.tree.map(lambda leaf: rng.normal(size=(8, *leaf.shape)).astype(np.float32), params)
    sums = ((rng.normal(size=8).astype(np.float32), local), np.arange(8))
    for size in (0, 1000, 2**22):
        plan = TWINS["explicit"](small_config(bucket_bytes=size), mesh).plan

        def reduced(own: Any, plan: Any = plan) -> Any:
            return data_parallel.all_reduce(plan, jax.tree.map(lambda leaf: leaf[0], own))

        found.append(jax.jit(jax.shard_map(reduced, mesh=mesh, in_specs=P("data"), out_specs=P()))(sums))
        jax.tree.map(np.testing.assert_array_equal, found[-1], found[0])
    exact = jax.tree.map(lambda leaf: leaf.astype(np.float64).sum(0), sums)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=0, atol=1e-5), found[-1], exact)


def test_a_negative_size():
    with pytest.raises(ValueError, match="bucket_bytes is -1; give at least 0"):
        TWINS["explicit"](small_config(bucket_bytes=-1), make_mesh("data_parallel", 1))
