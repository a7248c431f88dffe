"""The training loop: one compilation, no waiting, honest records."""

import math

import jax
import numpy as np
import pytest

from bench import TWINS
from shared.data import Dataset
from shared.placement import make_mesh
from shared.training import Clock, evaluate, train
from tests.small import small_config

TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 40, np.uint8)


def make(name: str, **changes):
    config = small_config(**changes)
    twin = TWINS[name](config, make_mesh(config.strategy, min(4, jax.device_count())))
    return twin, Dataset(TEXT, config.model.window, config.batch, config.seed)


@pytest.mark.parametrize("name", TWINS)
def test_nothing_compiles_after_the_first_step(name: str):
    """Neither the step, whose output must be placed like its input, nor anything in the loop around it."""
    twin, dataset = make(name, steps=6)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **rest: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    counts = []
    train(twin, dataset, lambda record: counts.append(len(compiled)))
    assert counts[0] > 0, "the listener hears nothing, so the count means nothing"
    assert counts[-1] == counts[0]


def test_metrics_are_read_one_step_late():
    """The step after has been dispatched before the host waits for the metrics of this one."""
    twin, dataset = make("auto", steps=4)
    happened = []

    def watched(step: int):
        happened.append(f"batch {step + 1}")
        return dataset(step)

    train(twin, watched, lambda record: happened.append(f"report {record.step}"))
    assert happened == ["batch 1", "batch 2", "report 1", "batch 3", "report 2", "batch 4", "report 3", "report 4"]


def test_the_old_state_is_donated():
    twin, dataset = make("explicit")
    state = twin.init(jax.random.key(0))
    twin.train_step(state, twin.place_batch(dataset(0)))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))


@pytest.mark.parametrize("name", TWINS)
def test_training_learns(name: str):
    twin, dataset = make(name, steps=60, learning_rate=0.01)
    records = []
    state = train(twin, dataset, records.append)
    assert [record.step for record in records] == list(range(1, 61))
    assert records[0].loss == pytest.approx(math.log(256), abs=0.6)
    assert records[-1].loss < 2.6
    for record in records:
        assert record.perplexity == pytest.approx(math.exp(record.loss), rel=1e-5)
        assert record.tokens == dataset(record.step - 1).weights.sum()
    assert records[0].tokens_per_second is None
    assert records[-1].tokens_per_second > 0
    assert evaluate(twin, state, dataset) < 2.6
    assert int(state.step) == 60


def test_evaluation_is_the_mean_over_all_windows():
    """A batch that is filled up, and a window that is cut short, count for what they hold."""
    twin, _ = make("auto")
    config = twin.plan.config
    dataset = Dataset(TEXT[:205], config.model.window, batch=1)  # 26 windows, the last of 4 positions
    state = twin.init(jax.random.key(0))
    losses = []
    for window in range(dataset.windows):
        cut = dataset.cut(np.full(config.batch, window))
        logits = np.asarray(twin.logits(state, twin.place_batch(cut).tokens))[0].astype(np.float64)
        log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        counted = int(cut.weights[0].sum())
        losses += [-log_probabilities[t, cut.targets[0, t]] for t in range(counted)]
    assert len(losses) == 204
    assert evaluate(twin, state, dataset) == pytest.approx(np.mean(losses), rel=1e-5)


def test_a_loss_that_is_no_number_ends_the_run_with_its_step():
    clock = Clock()
    with pytest.raises(ValueError, match=r"the loss of step 7 is nan .*; try a lower --learning-rate"):
        clock.record(7, {"loss": np.nan, "perplexity": np.nan, "gradient_norm": 1.0, "tokens": 3.0})
