"""The legacy chapter is the same step."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from bench.proof.prove import proof_batch, proof_config
from explicit_shardmap import pmap
from shared import single_device
from shared.model.state import TrainState, initial_state
from tests.small import small_config
from twinstep.equivalence.compare import compare_results
from twinstep.equivalence.leaves import named_results
from twinstep.equivalence.perturbation import DRAWS, moved, nudged_tree
from twinstep.equivalence.tolerance import work_behind
from twinstep.tree import named_leaves


def observed(loss: Any, gradients: Any, tokens: Any, logits: Any, after: Any, metrics: Any) -> dict[str, Any]:
    return {
        "loss": loss,
        "metrics": {"counted": tokens, **metrics},
        "logits": logits,
        "gradients": gradients,
        "parameters": after.params,
    }


@pytest.mark.parametrize("devices", [pytest.param(2, marks=pytest.mark.slow), 8])
def test_the_step_under_pmap_is_the_step(devices: int, float64: None):
    """In float64, with dropout, an empty device and active clipping; and every device returns the same."""
    config = proof_config("float64", "data_parallel")
    state, batch = initial_state(config, jax.random.key(0)), proof_batch(config)
    single = single_device.build(config)

    def on_one(state: TrainState) -> dict[str, Any]:
        return observed(
            *single.loss_and_grads(state, batch), single.logits(state, batch.tokens), *single.train_step(state, batch)
        )

    expected = on_one(state)
    draws = [dataclasses.replace(state, params=nudged_tree(state.params, seed)) for seed in range(DRAWS)]
    scales = moved(named_results(expected), [named_results(on_one(draw)) for draw in draws])
    step = pmap.build(config, jax.devices()[:devices])
    copies, dealt = step.replicate(state), step.deal(batch)
    loss, gradients, tokens = jax.block_until_ready(step.loss_and_grads(copies, dealt))
    logits = jax.block_until_ready(step.logits(copies, dealt.tokens))
    after, metrics = jax.block_until_ready(step.train_step(copies, dealt))
    results = (loss, gradients, tokens, after, metrics)
    for name, leaf in named_leaves(results).items():
        if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            assert (np.asarray(leaf) == np.asarray(leaf)[:1]).all(), f"{name} differs between devices"
    first = jax.tree.map(lambda leaf: np.asarray(leaf[0]), (loss, gradients, tokens, after.params, metrics))
    loss, gradients, tokens, params, metrics = first
    logits = np.asarray(logits).reshape(expected["logits"].shape)
    found = {
        "loss": loss,
        "metrics": {"counted": tokens, **metrics},
        "logits": logits,
        "gradients": gradients,
        "parameters": params,
    }
    report = compare_results(expected, found, work_behind(state.params, batch), moved=scales)
    assert report.equal, report


def test_a_batch_that_does_not_divide():
    with pytest.raises(ValueError, match="batch=8 cannot be split evenly over 3 devices"):
        pmap.build(small_config(), jax.devices()[:3])
