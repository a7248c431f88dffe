"""The comparison itself: it must see every difference, name it, and take nothing correct for one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bench.proof.prove import proof_batch, proof_config
from shared.model.state import abstract_state, initial_state
from shared.placement.mesh import make_mesh
from twinstep.equivalence.compare import assert_equivalent, compare, compare_results
from twinstep.equivalence.replicas import differing_replicas
from twinstep.equivalence.tolerance import Work, tolerance, work_behind
from twinstep.tree import named_leaves

WORK = Work(terms=1000, roundings=50)


def results(factor: float = 1.0, dtype: str = "float32") -> dict:
    random = np.random.default_rng(0)
    gradients = {name: random.normal(size=shape).astype(dtype) for name, shape in (("a", (8, 4)), ("b", (4,)))}
    return {"loss": np.array(2.5, dtype), "gradients": {name: factor * leaf for name, leaf in gradients.items()}}


def test_equal_results_are_equal():
    report = compare_results(results(), results(), WORK)
    assert report.equal
    assert str(report).startswith("equal: 0 of 3 leaves differ")


@pytest.mark.parametrize("factor", [1.001, 0.999, 8.0, -1.0])
def test_a_wrong_factor_is_seen_in_float32(factor: float):
    report = compare_results(results(), results(factor), WORK)
    assert {leaf.name for leaf in report.leaves if not leaf.equal} == {"gradients.a", "gradients.b"}
    assert f"gradients: {factor:.4g} times the reference (2 of 2 leaves)" in str(report)


def test_the_rule_rejects_1_001_for_a_large_model():
    """However large the model that the rule is asked about, within reason, it must stay a check."""
    config = proof_config("float32", "data_parallel")
    large = dataclasses.replace(config, model=dataclasses.replace(config.model, layers=48, d_model=1024, d_ff=4096))
    assert tolerance("float32", work_behind(abstract_state(large).params, proof_batch(config))) < 0.0009


def test_a_single_wrong_number_is_seen():
    wrong = results()
    wrong["gradients"]["a"][3, 2] *= 1.01
    report = compare_results(results(), wrong, WORK)
    assert [leaf.name for leaf in report.leaves if not leaf.equal] == ["gradients.a"]


def test_a_leaf_that_holds_nothing_but_rounding_is_measured_by_how_far_it_moves():
    """The key bias has a true gradient of zero: its rounding must not count, but a real value in it must."""
    left, right = results(), results()
    left["gradients"]["zero"], right["gradients"]["zero"] = np.float32([1e-9, -1e-9]), np.float32([-2e-9, 1e-9])
    moved = {"gradients.zero": 1e-9}
    assert not compare_results(left, right, WORK).equal
    assert compare_results(left, right, WORK, moved=moved).equal
    right["gradients"]["zero"] = np.float32([1e-8, 0])
    assert not compare_results(left, right, WORK, moved=moved).equal


def test_nan_on_both_sides_proves_nothing_and_is_refused_by_name():
    left, right = results(), results()
    left["gradients"]["a"][0, 0] = right["gradients"]["a"][0, 0] = np.nan
    report = compare_results(left, right, WORK)
    assert not report.equal
    assert "gradients.a: NaN in the reference and in the candidate" in str(report)


def test_infinities_are_equal_where_both_have_them_and_only_there():
    left, right = results(), results()
    left["gradients"]["a"][0, 0] = right["gradients"]["a"][0, 0] = -np.inf
    assert compare_results(left, right, WORK).equal
    right["gradients"]["a"][1, 1] *= 1.01
    assert not compare_results(left, right, WORK).equal
    right = results()
    for wrong in (np.inf, 1.0):
        right["gradients"]["a"][0, 0] = wrong
        assert not compare_results(left, right, WORK).equal


def test_missing_leaves_shapes_and_types_are_named():
    wrong = results()
    wrong["gradients"]["a"] = wrong["gradients"]["a"].T
    wrong["extra"] = wrong["gradients"].pop("b")
    wrong["loss"] = wrong["loss"].astype(np.float16)
    text = str(compare_results(results(), wrong, WORK))
    assert "gradients.b: only in the reference" in text
    assert "extra: only in the candidate" in text
    assert "gradients.a: float32[8, 4] in the reference, float32[4, 8] in the candidate" in text
    assert "loss: float32[] in the reference, float16[] in the candidate" in text


def test_replicas_that_drift_apart_are_seen():
    """JAX calls this array fully replicated, and numpy shows the first copy only."""
    mesh = make_mesh("data_parallel", 4)
    copies = [
        jax.device_put(np.float32([1, 2 + 1e-3 * (number == 3)]), device) for number, device in enumerate(mesh.devices)
    ]
    drifted = jax.make_array_from_single_device_arrays((2,), NamedSharding(mesh, P()), copies)
    assert drifted.is_fully_replicated
    np.testing.assert_array_equal(drifted, np.float32([1, 2]))
    (problem,) = differing_replicas({"weight": drifted})
    assert "weight" in problem
    assert "1.00e-03" in problem
    report = compare_results({"weight": np.float32([1, 2])}, {"weight": drifted}, WORK)
    assert not report.equal


def test_functions_that_donate_their_arguments_can_be_compared():
    state = {"w": jnp.arange(4.0)}
    double = jax.jit(lambda state, batch: jax.tree.map(lambda w: w * batch, state), donate_argnums=0)
    assert_equivalent(double, double, state, 2.0)
    assert not state["w"].is_deleted()


def test_the_message_can_be_read():
    with pytest.raises(AssertionError) as caught:
        assert_equivalent(
            lambda state, batch: {"gradients": state}, lambda state, batch: {"gradients": 4 * state}, np.ones(3), 0
        )
    assert "NOT EQUAL: 1 of 1 leaves differ" in str(caught.value)
    assert "gradients: 4 times the reference" in str(caught.value)


def test_a_tolerance_of_ones_own():
    report = compare(lambda s, b: s, lambda s, b: s * 1.01, np.ones(3), 0, relative=0.1)
    assert report.equal


def test_there_is_no_rule_for_other_types():
    with pytest.raises(ValueError, match="no tolerance is stated for float8_e5m2"):
        tolerance(jnp.float8_e5m2, WORK)
    wrong = {"scale": jnp.ones(2, jnp.float8_e5m2)}
    with pytest.raises(ValueError, match="scale: no tolerance"):
        compare_results(wrong, wrong, WORK)


def test_random_keys_and_whole_numbers_must_be_the_same():
    state = initial_state(proof_config("float32", "data_parallel"), jax.random.key(0))
    assert compare_results(state, state, WORK).equal
    other = dataclasses.replace(state, key=jax.random.key(1), step=state.step + 1)
    differing = {leaf.name for leaf in compare_results(state, other, WORK).leaves if not leaf.equal}
    assert differing == {"key", "step"}


def test_names_of_leaves():
    names = named_leaves(abstract_state(proof_config("float32", "data_parallel")))
    assert "params.blocks.attention.key.bias" in names


def test_the_limits_are_what_the_docs_say():
    """A limit that somebody widens is no longer a proof."""
    config = proof_config("float32", "data_parallel")
    work = work_behind(abstract_state(config).params, proof_batch(config))
    assert tolerance("float64", work) == 1e-12
    assert tolerance("float32", work) == pytest.approx(2.6e-5, rel=0.02)
    assert tolerance("bfloat16", work) == pytest.approx(5.0e-2, rel=0.05)


def test_a_tolerance_of_ones_own_does_not_excuse_whole_numbers():
    assert not compare_results({"step": np.int32(20)}, {"step": np.int32(21)}, WORK, relative=0.1).equal


def test_both_parts_of_complex_numbers_count():
    assert not compare_results({"z": np.complex64([1 + 1j])}, {"z": np.complex64([1 + 2j])}, WORK).equal
