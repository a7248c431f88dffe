"""What a report says of the cause, for steps that are not this project's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from twinstep.equivalence.compare import compare, compare_results
from twinstep.equivalence.hints import Suspect
from twinstep.equivalence.tolerance import Work

WORK = Work(terms=1000, roundings=50)
RANDOM = np.random.default_rng(0)
PARAMS = {
    name: RANDOM.normal(size=shape).astype(np.float32) for name, shape in (("a", (3, 4)), ("b", (4, 2)), ("c", (2, 5)))
}
BATCH = {"x": RANDOM.normal(size=(8, 3)).astype(np.float32), "weight": (np.arange(8) % 3 > 0).astype(np.float32)}


def total(params: dict, batch: dict) -> jax.Array:
    return jnp.sum(
        batch["weight"] * jnp.sum(jnp.tanh(batch["x"] @ params["a"] @ params["b"] @ params["c"]) ** 2, axis=1)
    )


def mean(params: dict, batch: dict) -> jax.Array:
    return total(params, batch) / jnp.sum(batch["weight"])


@jax.jit
def reference(params: dict, batch: dict) -> dict:
    return {"gradients": jax.grad(mean)(params, batch)}


def over(sizes: dict[str, int], step, split: tuple[str, ...]):
    """The step for one device of such a mesh, with the batch split over some of its axes."""
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes))
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P(split)), out_specs=P(), check_vma=False))


def local(params: dict, batch: dict) -> dict:
    return {"gradients": jax.grad(mean)(params, batch)}


def test_the_mean_of_means_is_named():
    report = compare(reference, over({"data": 2}, lambda *a: lax.pmean(local(*a), "data"), ("data",)), PARAMS, BATCH)
    assert "gradients: exactly what comes of averaging what each of the 2 devices along data has" in str(report)


def test_a_missing_reduction_is_named_with_its_axis():
    report = compare(
        reference,
        over({"data": 2, "fsdp": 2}, lambda *a: lax.pmean(local(*a), "data"), ("data", "fsdp")),
        PARAMS,
        BATCH,
    )
    assert "a reduction over fsdp (along data they agree) is missing" in str(report)
    report = compare(reference, over({"data": 4}, local, ("data",)), PARAMS, BATCH)
    assert (
        "exactly what comes of reducing nothing: each of the 4 devices along data keeps what its own rows give"
        in str(report)
    )


@pytest.mark.parametrize(
    ("axes", "named"), [(("data",), "2 devices along data"), (("data", "fsdp"), "8 devices along data x fsdp")]
)
def test_a_factor_is_named_with_its_axes(axes: tuple[str, ...], named: str):
    def summed(params: dict, batch: dict) -> dict:
        share = {
            "gradients": jax.grad(lambda p: total(p, batch) / lax.psum(jnp.sum(batch["weight"]), ("data", "fsdp")))(
                params
            )
        }
        return jax.tree.map(lambda leaf: lax.psum(leaf, ("data", "fsdp")) * lax.psum(1, axes), share)

    report = compare(reference, over({"data": 2, "fsdp": 4}, summed, ("data", "fsdp")), PARAMS, BATCH)
    assert f"(3 of 3 leaves), on {named}: reduced twice" in str(report)


def test_a_short_type_is_named():
    def shortened(params: dict, batch: dict) -> dict:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), reference(params, batch))

    assert "as rounding to bfloat16" in str(compare(reference, jax.jit(shortened), PARAMS, BATCH))


def test_what_is_equal_needs_no_explanation():
    assert compare(reference, reference, PARAMS, BATCH).hints == ()


def test_a_reference_that_takes_no_other_batch_is_not_asked():
    fixed = jax.jit(lambda params, batch: {"gradients": batch["x"].reshape(8, 3).sum(0)})
    wrong = over({"data": 2}, lambda params, batch: {"gradients": batch["x"].sum(0)}, ("data",))
    report = compare(fixed, wrong, PARAMS, BATCH)
    assert not report.equal
    assert "a reduction over data is missing" in str(report)


def test_where_to_look_is_said():
    right = {"loss": np.float32(1), "gradients": np.ones(3, np.float32), "parameters": np.ones(3, np.float32)}
    behind = compare_results(right, {**right, "parameters": np.float32([1, 2, 1])}, WORK)
    assert "gradients agree and parameters do not" in str(behind)
    backward = compare_results(right, {**right, "gradients": np.float32([1, 2, 1])}, WORK)
    assert "the loss agrees and gradients do not" in str(backward)
    nothing = compare_results(right, {**right, "gradients": np.float32([np.nan] * 3)}, WORK)
    assert "gradients: not finite" in str(nothing)


def test_one_number_is_no_explanation():
    """Two losses can be alike by chance; thousands of numbers cannot."""
    by_chance = Suspect("chance", lambda: {"loss": np.float32(2)})
    right, found = {"loss": np.float32(1)}, {"loss": np.float32(2)}
    assert "chance" not in str(compare_results(right, found, WORK, suspects=[by_chance]))


def test_all_devices_with_the_same_rows_are_named():
    def same(params: dict, batch: dict) -> dict:
        first = jax.tree.map(lambda leaf: lax.all_gather(leaf, "data")[0], batch)
        return jax.tree.map(lambda leaf: lax.pmean(leaf, "data"), local(params, first))

    report = compare(reference, over({"data": 2}, same, ("data",)), PARAMS, BATCH)
    assert "exactly what comes of giving all of the 2 devices along data the same rows" in str(report)
