"""The order of the data: a pure function of (seed, step), without replacement, each batch in its own memory."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.data.batches import Dataset
from shared.model.state import initial_state
from shared.placement.layout import layout
from shared.placement.mesh import make_mesh
from shared.placement.placing import place
from shared.placement.strategies import STRATEGIES
from tests.small import small_config

SIZES = st.integers(1, 9), st.integers(1, 6), st.integers(0, 200), st.integers(0, 2**32 - 1)


def make(window: int, batch: int, extra: int, seed: int) -> Dataset:
    """A dataset whose text is just long enough, or longer; no two of its bytes are alike as far as bytes go."""
    size = window * batch + 1 + extra
    return Dataset((np.arange(size) % 256).astype(np.uint8), window, batch, seed)


@given(*SIZES, st.integers(0, 10_000))
def test_a_batch_is_a_function_of_seed_and_step(window: int, batch: int, extra: int, seed: int, step: int):
    first, again = (make(window, batch, extra, seed)(step) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True))
    assert first.tokens.shape == first.targets.shape == first.weights.shape == (batch, window)
    np.testing.assert_array_equal(first.rows, np.arange(batch))


@given(*SIZES)
def test_an_epoch_is_without_replacement(window: int, batch: int, extra: int, seed: int):
    """Every byte but the first is a target at most once in an epoch; all of them, but for windows left over."""
    size = window * batch + 1 + extra
    dataset = Dataset(np.zeros(size, np.uint8), window, batch, seed)
    seen = np.zeros(size, int)
    # The bytes do not say where they stand, so the positions are read through a text that does.
    places = np.arange(size)
    for step in range(dataset.batches_per_epoch):
        object.__setattr__(dataset, "text", places)
        cut = dataset(step)
        np.add.at(seen, cut.targets[cut.weights > 0], 1)
        np.testing.assert_array_equal((cut.tokens + 1)[cut.weights > 0], cut.targets[cut.weights > 0])
    assert seen[0] == 0
    assert seen.max() <= 1
    left_over = dataset.windows - dataset.batches_per_epoch * batch
    assert left_over < batch
    assert (seen[1:] == 0).sum() <= left_over * window


@given(*SIZES)
def test_epochs_and_seeds_differ_in_order(window: int, batch: int, extra: int, seed: int):
    dataset = make(window, batch, extra + 40 * window * batch, seed)
    epoch = dataset.batches_per_epoch
    other = make(window, batch, extra + 40 * window * batch, seed ^ 1)
    object.__setattr__(dataset, "text", np.arange(dataset.text.size))
    object.__setattr__(other, "text", np.arange(other.text.size))
    starts = [
        [set(d(first + step).tokens[:, 0]) for step in range(3)]
        for d, first in ((dataset, 0), (dataset, epoch), (other, 0))
    ]
    assert starts[0] != starts[1]
    assert starts[0] != starts[2]


@given(*SIZES)
@settings(max_examples=20)
def test_a_batch_owns_its_memory(window: int, batch: int, extra: int, seed: int):
    """JAX on CPU may use a numpy array in place: a shared buffer would change under a step that still runs."""
    dataset = make(window, batch, extra, seed)
    first, second = dataset(0), dataset(0)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert not np.shares_memory(a, b)
        assert not np.shares_memory(a, dataset.text)


def test_the_last_window_is_filled_up_with_positions_that_do_not_count():
    cut = Dataset(np.arange(10, dtype=np.uint8), window=4, batch=1).cut(np.array([2]))
    np.testing.assert_array_equal(cut.tokens, [[8, 9, 9, 9]])
    np.testing.assert_array_equal(cut.targets[0, :1], [9])
    np.testing.assert_array_equal(cut.weights, [[1, 0, 0, 0]])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_batch_does_not_depend_on_the_number_of_devices(strategy: str):
    """Put together again from the devices' pieces it is the same, and no token is in two different pieces."""
    config = small_config(strategy=strategy, heads=8)
    batch = make(config.model.seq_len, config.batch, 100, 0)(3)
    for devices in (1, 8):
        places = layout(config, make_mesh(strategy, devices))
        placed = place(places, batch, places.batch)
        for name in ("tokens", "targets", "weights", "rows"):
            np.testing.assert_array_equal(getattr(placed, name), getattr(batch, name))
        pieces = {str(shard.index): np.asarray(shard.data) for shard in placed.tokens.addressable_shards}
        assert sum(piece.size for piece in pieces.values()) == batch.tokens.size


def test_placing_copies():
    """Writing to a batch after it was placed must not reach the device.

    Only numpy arrays that happen to be aligned as JAX likes are used in place, so there must be many.
    """
    config = small_config()
    places = layout(config, make_mesh("data_parallel", 1))
    batches = [make(config.model.seq_len, config.batch, 0, 0)(step) for step in range(100)]
    placed = [place(places, batch, places.batch) for batch in batches]
    before = [np.array(batch.tokens) for batch in placed]
    for batch in batches:
        batch.tokens[:] = -1
    np.testing.assert_array_equal([batch.tokens for batch in placed], before)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (8, "the text has 8 bytes, but a window of 8 needs 9"),
        (17, "the text has 2 windows of 8, too few for a batch of 3"),
    ],
)
def test_a_text_that_is_too_short(size: int, message: str):
    with pytest.raises(ValueError, match=message):
        Dataset(np.zeros(size, np.uint8), window=8, batch=3)


def test_placing_a_state_copies():
    """The copy can be donated and the original is still there."""
    config = small_config()
    places = layout(config, make_mesh("data_parallel", 1))
    state = place(places, initial_state(config, jax.random.key(0)), places.state)
    copy = place(places, state, places.state)
    for leaf in jax.tree.leaves(copy):
        leaf.delete()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@given(*SIZES, st.integers(0, 8), st.integers(0, 8))
def test_some_rows_of_a_batch_are_those_rows(window: int, batch: int, extra: int, seed: int, first: int, more: int):
    """What one of several processes reads: its own rows of the batch that one process would read, and no others."""
    dataset = make(window, batch, extra, seed)
    rows = slice(min(first, batch - 1), min(first + more + 1, batch))
    whole, part = dataset(3), dataset(3, rows)
    assert len(part.rows) == rows.stop - rows.start
    for expected, found in zip(jax.tree.leaves(whole), jax.tree.leaves(part), strict=True):
        np.testing.assert_array_equal(found, expected[rows])
