"""A leaf rounded to a shorter type is recognised by its significant bits; one that has few bits anyway is not."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from twinstep.equivalence.compare import compare_results
from twinstep.equivalence.precision import rounded_to, significant_bits
from twinstep.equivalence.tolerance import Work

RANDOM = np.random.default_rng(0)
WORK = Work(1000, 40)


def rounded(values: np.ndarray, bits: int) -> np.ndarray:
    return np.asarray(lax.reduce_precision(values, 8, bits - 1))


def test_significant_bits():
    values = np.array([1.0, 3.0, -0.75, 1 + 2.0**-52, 2.0**-1074, float(jnp.bfloat16(0.1))])
    assert significant_bits(values).tolist() == [1, 2, 2, 53, 1, 8]


@pytest.mark.parametrize("bits", [4, 5, 6])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_a_leaf_rounded_within_tolerance_is_not_equal(bits: int, scale: float):
    """In bfloat16, whose tolerance here is 5 %: gradients reduced in a type of 4, 5 and 6 bits."""
    right = np.asarray(jnp.asarray(scale * RANDOM.normal(size=(8, 8)), jnp.bfloat16))
    report = compare_results({"g": right}, {"g": rounded(right, bits)}, WORK)
    assert all(leaf.equal for leaf in report.leaves), "the tolerance alone would say so"
    assert not report.equal
    assert f"g: no number has more than {bits} significant bits" in str(report)


def test_eight_bits_are_enough_in_a_bfloat16_computation():
    exact = RANDOM.normal(size=100).astype(np.float32)
    assert rounded_to(exact, rounded(exact, 8)) == (8, 24)
    assert compare_results({"g": exact}, {"g": rounded(exact, 8)}, WORK, dtype=jnp.bfloat16).equal
    assert not compare_results({"g": exact}, {"g": rounded(exact, 7)}, WORK, dtype=jnp.bfloat16).equal


def test_a_tolerance_of_ones_own_allows_for_it():
    right = RANDOM.normal(size=100).astype(np.float32)
    assert compare_results({"g": right}, {"g": rounded(right, 8)}, WORK, relative=0.01).equal
    assert not compare_results({"g": right}, {"g": rounded(right, 4)}, WORK, relative=0.01).equal


@pytest.mark.parametrize(
    "short",
    [
        np.ones(64),
        np.arange(64.0),
        np.where(np.arange(64) % 2, 0.5, -0.25),
        np.zeros(64),
        RANDOM.normal(size=8),
    ],
    ids=["ones", "counts", "halves", "zeros", "few"],
)
def test_counts_and_halves_are_not_rounded(short: np.ndarray):
    """One side has a last bit of noise in all of them."""
    noisy = np.nextafter(short.astype(np.float32), np.float32(np.inf)) * (short != 0)
    assert rounded_to(noisy, short.astype(np.float32)) is None
    assert compare_results({"g": noisy}, {"g": short.astype(np.float32)}, WORK).equal


def test_a_sum_in_another_order_is_not_rounded():
    """A sum in bfloat16's own bits, in two orders, a hundred times."""
    terms = jnp.asarray(RANDOM.normal(size=(100, 16, 64)), jnp.bfloat16)
    for one in terms:
        left, right = np.asarray(one.sum(0)), np.asarray(one[::-1].cumsum(0)[-1])
        assert rounded_to(left, right) is None
