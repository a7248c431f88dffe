"""The two twins are the same step as the single-device one, in data parallelism. (Others: test_strategies.py.)"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from bench import DEVICE_COUNTS, TWINS
from bench.proof.programs import Programs, compiled, compiled_together
from bench.proof.prove import proof_batch, proof_config, prove
from bench.proof.trajectories import OPTIMIZERS, trajectories
from shared import single_device
from shared.config import Config, DType
from shared.model.state import initial_state
from shared.placement.mesh import make_mesh
from twinstep.equivalence.perturbation import DRAWS
from twinstep.tree import named_leaves

MOST = DEVICE_COUNTS[-1]


def changed(config: Config, **model: object) -> Config:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **model))


def assert_proved(config: Config, counts: Sequence[int], compile: Any = compiled_together) -> dict:
    found = prove(config, counts, compile=compile)
    for devices, pairs in found.items():
        for pair, report in pairs.items():
            assert report.equal, f"{devices} devices, {pair}: {report}"
    return found


def as_called(twin: Any, *arguments: Any) -> Programs:
    """The three functions as users call them in float64 on most devices; elsewhere as one program, in half the time."""
    apart = twin.plan.config.model.dtype == "float64" and twin.mesh.size == MOST
    return (compiled if apart else compiled_together)(twin, *arguments)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_everything_switched_on(dtype: DType):
    """Loss, logits, gradients and update with dropout, an empty device, and active clipping.

    On 1, 2, 4 and 8 devices in float64, on 2 and 8 in the shorter types (`compare` and CI have the others).
    And where reductions are compiled alike the twins give the same bits: logits, of which none is, and the loss.
    """
    counts = DEVICE_COUNTS if dtype == "float64" else (2, MOST)
    for devices, pairs in assert_proved(proof_config(dtype, "data_parallel"), counts, as_called).items():
        leaves = pairs["auto / explicit"].leaves
        differing = {leaf.name for leaf in leaves if leaf.group in ("loss", "logits") and leaf.error}
        assert not differing, devices


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
    assert_proved(changed(proof_config("float64", "data_parallel"), remat=True), [2, MOST])


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


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [*(("data_parallel", name) for name in OPTIMIZERS), ("zero_1", "adamw"), ("fsdp_context_tensor", "sgd")],
)
def test_trajectories(strategy: str, optimizer: str):
    """Eight steps, with a resume half-way. AdamW is a smoke test: it would pass with gradients 8 times too large."""
    for pair, report in trajectories(optimizer, strategy, MOST).items():
        assert report.equal, f"{pair}: {report}"


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_gradient_wrong_by_a_factor_of_1_001_is_rejected(dtype: DType, monkeypatch: pytest.MonkeyPatch):
    """In every type. In bfloat16 a leaf alone may be off by more; all gradients together may not."""
    honest = Programs.observe
    seen = []

    def every_last(*arguments: Any) -> dict[str, Any]:
        results = honest(*arguments)
        seen.append(results)
        # oracle, single, the draws that measure rounding, auto and again, then explicit
        if len(seen) > DRAWS + (3 if dtype == "float64" else 4):
            results["gradients"] = jax.tree.map(lambda leaf: leaf * 1.001, results["gradients"])
        return results

    monkeypatch.setattr(Programs, "observe", every_last)
    # The programs of `test_everything_switched_on`, which the compilation cache has.
    report = prove(proof_config(dtype, "data_parallel"), [2], compile=compiled_together)[2]["auto / explicit"]
    assert not report.equal
    assert "1.001" in str(report) or "1.0009" in str(report) or "1.0010" in str(report)


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
