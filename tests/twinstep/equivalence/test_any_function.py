"""Functions of any arguments that return anything: nothing hides a difference, and nothing equal is refused."""

import functools
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from twinstep import assert_equivalent, compare
from twinstep.equivalence.compare import compare_results
from twinstep.equivalence.tolerance import Work
from twinstep.tree import group_of, named_leaves

WORK = Work(terms=1000, roundings=50)
X = np.linspace(0, 1, 24, dtype=np.float32).reshape(8, 3)


def with_a_key(factor: float) -> Any:
    def step(state: Any, batch: Any) -> Any:
        params, key = state
        new = jax.tree.map(lambda w: w - factor * 0.01 * w * jnp.mean(batch), params)
        return {"params": new, "rng": jax.random.split(key)[0]}, {"loss": jnp.mean(batch)}

    return jax.jit(step)


STATE = ({"w": jnp.linspace(-1, 1, 12).reshape(3, 4), "b": jnp.ones(4)}, jax.random.key(0))


@pytest.mark.parametrize("factor", [100, 1.1, 1.00001])
def test_a_key_in_the_result_hides_nothing(factor: float):
    report = compare(with_a_key(1), with_a_key(factor), STATE, jnp.ones((8, 4)))
    assert not report.equal
    assert "0.params" in str(report)


def test_what_float32_cannot_see_float64_does():
    report = compare(with_a_key(1), with_a_key(1.00001), STATE, jnp.ones((8, 4)))
    assert all(leaf.equal for leaf in report.leaves)
    assert "(in float64;" in str(report)


@pytest.mark.parametrize("beside", [np.int32(16384), np.float32(1e6), np.uint32([1, 2**31])])
def test_a_large_number_beside_a_small_one_hides_nothing(beside: Any):
    right, wrong = ({"loss": np.float32(loss), "count": beside} for loss in (2.5, 2.501))
    assert not compare_results((None, right), (None, wrong), WORK).equal
    assert not compare_results({"metrics": right}, {"metrics": wrong}, WORK).equal


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_a_factor_common_to_many_leaves_is_seen_in_every_type(dtype: str):
    random = np.random.default_rng(0)
    right = [random.normal(size=10).astype(jnp.dtype(dtype)) for _ in range(100)]
    wrong = [(leaf.astype(np.float64) * 1.1).astype(leaf.dtype) for leaf in right]
    for tree in (lambda leaves: {"gradients": leaves}, lambda leaves: {f"g{i}": leaf for i, leaf in enumerate(leaves)}):
        report = compare_results(tree(right), tree(wrong), Work(terms=1000, roundings=200))
        assert not report.equal
        noise = [(leaf.astype(np.float64) * (1 + random.normal() * 0.01)).astype(leaf.dtype) for leaf in right]
        if dtype == "bfloat16":
            assert compare_results(tree(right), tree(noise), Work(terms=1000, roundings=200)).equal


def test_nothing_compared_is_refused_with_what_to_do():
    for function in (lambda x: None, lambda x: {}, lambda x: (None, [])):
        with pytest.raises(ValueError, match=r"the reference returned nothing to compare.*return what it computes"):
            compare(function, function, X)
    assert not compare_results({"name": "a"}, {"name": "a"}, WORK).equal


def test_keys_that_differ_between_devices_are_reported():
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    def step(key: Any, batch: Any) -> Any:
        return {"rng": jax.random.fold_in(key, jax.lax.axis_index("data")), "loss": jax.lax.pmean(batch.mean(), "data")}

    report = compare(
        lambda key, batch: {"rng": key, "loss": batch.mean()}, jax.jit(step), jax.random.key(0), jnp.ones((8, 2))
    )
    assert not report.equal
    assert "rng: the copies on" in str(report)


def test_numbers_of_python():
    assert_equivalent(
        lambda x: {"loss": float(x.sum()), "step": 3}, lambda x: {"loss": jnp.sum(x), "step": jnp.int32(3)}, X
    )
    right, near, wrong = ({"loss": 1 / 3, "step": 3} | other for other in ({}, {"loss": 1 / 3 + 1e-7}, {"step": 4}))
    assert compare_results(right, near, WORK).equal
    assert not compare_results(right, near, WORK, python=jnp.float64).equal
    assert not compare_results(right, wrong, WORK).equal
    assert not compare_results({"n": 2**60}, {"n": 2**60 + 1}, WORK).equal
    assert not compare_results({"n": np.int64(2**60)}, {"n": np.int64(2**60 + 1)}, WORK).equal


def test_leaves_that_are_no_numbers_are_compared_by_equality():
    float0 = np.zeros(3, jax.dtypes.float0)
    tree = {"activation": jnp.tanh, "name": "relu", "integer gradient": float0, "bias": None, "w": X}
    assert compare_results(tree, dict(tree), WORK).equal
    for name, other in (("activation", jnp.sin), ("name", "gelu"), ("integer gradient", float0[:2]), ("bias", X)):
        report = compare_results(tree, {**tree, name: other}, WORK)
        assert not report.equal
        assert f"{name}: " in report.problems[0]


def test_leaves_with_names_that_read_alike_are_all_compared():
    right = {"a.b": X, "a": {"b": X}, "'a.b'": X, "'a": {"b'": X}}
    assert len(compare_results(right, right, WORK).leaves) == 4
    for name in right:
        wrong = {**right, name: jax.tree.map(lambda leaf: leaf + 1, right[name])}
        assert sum(not leaf.equal for leaf in compare_results(right, wrong, WORK).leaves) == 1


def test_groups():
    assert [group_of(name) for name in named_leaves(({"params": {"w": 1}}, {"loss": 1}))] == ["0.params", "1.loss"]
    assert [group_of(name) for name in named_leaves({"gradients": {"w": 1}, "loss": 1})] == ["gradients", "loss"]


def test_keyword_arguments_static_arguments_and_numpy_changed_in_place():
    @functools.partial(jax.jit, static_argnames="mode")
    def step(x: Any, *, mode: str, scale: Any) -> Any:
        return {"y": x * scale if mode == "train" else x}

    def in_place(x: Any, *, mode: str, scale: Any) -> Any:
        x *= scale
        return {"y": jnp.asarray(x)}

    before = X.copy()
    assert_equivalent(step, in_place, X, kwargs={"mode": "train", "scale": np.float32(2)})
    np.testing.assert_array_equal(X, before)


def test_which_tiers_ran_and_why_one_could_not():
    assert "float64: 1 leaves compared" in str(compare(jnp.sin, jnp.sin, X))

    def narrow(x: Any) -> Any:
        return jnp.sin(x.astype(jnp.bfloat16)).astype(x.dtype)

    report = compare(narrow, narrow, X, dtype=jnp.bfloat16)
    assert report.equal
    assert "float64: not compared: the reference does not compute in it: it casts float64 to bfloat16" in str(report)
    compiled = jax.jit(jnp.sin).lower(X).compile()
    assert "float64: not compared: " in str(compare(jnp.sin, compiled, X))


def test_a_leaf_whose_exact_value_is_zero_is_right_and_said_to_prove_little():
    """The order of a sum decides all of its bits."""
    random = np.random.default_rng(0)
    values = random.normal(size=(64, 5)).astype(np.float32)

    def reference(w: Any, x: Any) -> Any:
        centred = x * w - jnp.mean(x * w, axis=0)
        return {"zero": jnp.sum(centred, axis=0), "loss": jnp.sum(x * w)}

    def candidate(w: Any, x: Any) -> Any:
        return reference(w, x[::-1])

    report = assert_equivalent(reference, candidate, np.float32(1.5), values)
    assert "rounding alone may change zero" in str(report)
    wrong = compare(reference, lambda w, x: {**candidate(w, x), "zero": jnp.full(5, 1e-3)}, np.float32(1.5), values)
    assert [leaf.name for leaf in wrong.leaves if not leaf.equal] == ["zero"]


def test_importing_the_checker_loads_and_starts_nothing_else():
    program = (
        "import sys, logging; before = {*sys.modules}; hook = sys.unraisablehook\n"
        "from twinstep import assert_equivalent, compare, Report\n"
        "import jax; from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, 'a backend was started'\n"
        "assert sys.unraisablehook is hook and not logging.getLogger('twinstep').handlers\n"
        "print(*sorted({'flax', 'optax', 'orbax', 'tyro', 'pooch', 'pytest', 'shared', 'bench'} & {*sys.modules}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_sharded_argument_is_nudged_and_cast_where_it_is():
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    placed = jax.device_put(X, NamedSharding(mesh, P("data")))
    report = assert_equivalent(jax.jit(jnp.cumsum), jax.jit(lambda x: jnp.cumsum(x)), placed)
    assert report.float64 is not None
