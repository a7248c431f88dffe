"""The two twins are the same step as the single-device one, in data parallelism. (Others: tests/test_strategies.py.)"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
import pytest

from bench import DEVICE_COUNTS, TWINS
from bench.proof import proof_batch, proof_config, prove
from shared import single_device
from shared.config import Config
from shared.data import Dataset
from shared.equivalence import differing_replicas
from shared.placement import make_mesh
from shared.state import initial_state
from shared.tolerance import tolerance, work_behind
from shared.tree import named_leaves

MOST = DEVICE_COUNTS[-1]


def changed(config: Config, **model: object) -> Config:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **model))


def assert_proved(config: Config, counts: Sequence[int]) -> None:
    for devices, pairs in prove(config, counts).items():
        for pair, report in pairs.items():
            assert report.equal, f"{devices} devices, {pair}: {report}"


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_everything_switched_on(dtype: str):
    """Loss, logits, gradients and update with dropout, an empty device, and active clipping, on 1, 2, 4, 8 devices."""
    config = proof_config(dtype, "data_parallel")
    if dtype == "bfloat16":
        config = changed(config, param_dtype="float32")
    assert_proved(config, DEVICE_COUNTS)


def test_the_proof_has_what_can_go_wrong():
    """The batch leaves the first of 8 devices without a counted token, and the gradients are clipped."""
    config = proof_config("float32", "data_parallel")
    batch = proof_batch(config)
    counted = batch.weights.reshape(8, -1).sum(axis=1)
    assert counted[0] == 0
    assert (counted[1:] > 0).all()
    assert len(set(counted)) > 4, "devices should count different numbers of tokens"
    _, metrics = single_device.build(config).train_step(initial_state(config, jax.random.key(0)), batch)
    assert metrics["gradient_norm"] > 2 * config.optimizer.clip
    assert config.model.dropout > 0


def test_remat():
    assert_proved(changed(proof_config("float64", "data_parallel"), remat=True), DEVICE_COUNTS)


@pytest.mark.parametrize(
    "model",
    [{"remat": True, "layers": 3, "unroll": 1}, {"layers": 3, "unroll": 2}],
    ids=["remat in a loop", "loop with a rest"],
)
def test_forms_of_the_loop_over_layers(model: dict):
    assert_proved(changed(proof_config("float64", "data_parallel"), **model), [MOST])


def test_a_number_of_devices_that_is_no_power_of_two():
    config = dataclasses.replace(proof_config("float64", "data_parallel"), batch=6)
    assert_proved(config, [3])


@pytest.mark.parametrize("name", TWINS)
def test_twenty_steps_of_sgd_stay_together(name: str):
    """Losses and replicas. Under Adam, or clipped, such a test would pass with gradients 8 times too large."""
    config = changed(proof_config("float32", "data_parallel"), layers=1)
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, learning_rate=0.1, clip=0))
    text = np.random.default_rng(0).integers(0, 8, 2000).astype(np.uint8)  # few values: there is something to learn
    dataset = Dataset(text, config.model.window, config.batch)
    twin = TWINS[name](config, make_mesh(config.strategy, MOST))
    single = single_device.build(config)
    alone = initial_state(config, jax.random.key(0))
    state = twin.place_state(alone)
    losses = []
    for step in range(20):
        alone, expected = single.train_step(alone, dataset(step))
        state, found = twin.train_step(state, twin.place_batch(dataset(step)))
        losses.append((float(expected["loss"]), float(found["loss"])))
    ours, theirs = np.array(losses).T
    assert ours[-1] < ours[0] - 1, "nothing was learned, so nothing is shown"
    allowed = tolerance("float32", work_behind(alone.params, dataset(0)))
    assert (np.abs(theirs / ours - 1) <= allowed * np.arange(1, 21)).all()  # each step may add its own rounding
    assert not differing_replicas(named_leaves(state))


def test_both_twins_make_and_take_the_same_state():
    """A state made by one twin is a valid state of the other, equal to the bit."""
    config = proof_config("float32", "data_parallel")
    auto, explicit = (build(config, make_mesh(config.strategy, MOST)) for build in TWINS.values())
    made = [named_leaves(twin.init(jax.random.key(1))) for twin in (auto, explicit)]
    for name, leaf in made[0].items():
        assert leaf.sharding == made[1][name].sharding
        if name != "key":
            np.testing.assert_array_equal(leaf, made[1][name])
    loss, _, _ = explicit.loss_and_grads(auto.init(jax.random.key(1)), explicit.place_batch(proof_batch(config)))
    assert np.isfinite(loss)
