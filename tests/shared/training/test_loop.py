"""The training loop: one compilation, no waiting, honest records."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from bench import TWINS
from shared.data.batches import Batch, Dataset
from shared.model.state import TrainState
from shared.placement.mesh import make_mesh
from shared.training.loop import Clock, evaluate, train
from tests.small import small_config

TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 40, np.uint8)


def make(name: str, **changes):
    config = small_config(**changes)
    twin = TWINS[name](config, make_mesh(config.strategy, 4))
    return twin, Dataset(TEXT, config.model.seq_len, config.batch, config.seed)


@pytest.mark.parametrize("name", TWINS)
def test_nothing_compiles_after_the_first_step(name: str):
    """Neither the step, whose output must be placed like its input, nor anything in the loop around it."""
    twin, dataset = make(name)
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **rest: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    state, _ = twin.train_step(twin.init(jax.random.key(0)), twin.place_batch(dataset(0)))
    first = len(compiled)
    assert first > 0, "the listener hears nothing, so the count means nothing"
    for step in (1, 2):
        state, _ = twin.train_step(state, twin.place_batch(dataset(step)))
    assert len(compiled) == first
    train(twin, dataset, lambda record: None)
    assert len(compiled) == first


def test_metrics_are_read_one_step_late():
    """The host reads or waits for nothing of a step before it has dispatched the step after."""
    twin, dataset = make("auto", steps=4)
    happened = []

    class Metric:
        """A number that is still on its way, and notes who asks for it."""

        def __init__(self, step: int):
            self.step = step

        def __array__(self, *_: object, **__: object) -> np.ndarray:
            happened.append(f"read {self.step}")
            return np.array(1.0)

        def block_until_ready(self) -> "Metric":
            happened.append(f"read {self.step}")
            return self

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Metric]]:
        number = 1 + sum("dispatched" in event for event in happened)
        happened.append(f"dispatched {number}")
        return state, {name: Metric(number) for name in ("loss", "perplexity", "gradient_norm", "tokens")}

    train(
        dataclasses.replace(twin, train_step=step), dataset, lambda record: happened.append(f"reported {record.step}")
    )
    assert list(dict.fromkeys(happened)) == [
        "dispatched 1", "dispatched 2", "read 1", "reported 1", "dispatched 3", "read 2", "reported 2",
        "dispatched 4", "read 3", "reported 3", "read 4", "reported 4",
    ]  # fmt: skip


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
    assert evaluate(twin, state, TEXT)[0] < 2.6
    assert int(state.step) == 60


def test_evaluation_is_the_mean_over_all_windows():
    """A batch that is filled up, and a window that is cut short, count for what they hold."""
    twin, _ = make("auto")
    config = twin.plan.config
    text = TEXT[:205]  # 26 windows, the last of 4 positions
    dataset = Dataset(text, config.model.seq_len, batch=1)
    state = twin.init(jax.random.key(0))
    losses = []
    for window in range(dataset.windows):
        cut = dataset.cut(np.full(config.batch, window))
        logits = np.asarray(twin.logits(state, twin.place_batch(cut).tokens))[0].astype(np.float64)
        log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        counted = int(cut.weights[0].sum())
        losses += [-log_probabilities[t, cut.targets[0, t]] for t in range(counted)]
    assert len(losses) == 204
    assert evaluate(twin, state, text) == (pytest.approx(np.mean(losses), rel=1e-5), 26)
    first = np.mean(losses[: 2 * config.batch * config.model.seq_len])
    assert evaluate(twin, state, text, limit=2) == (pytest.approx(first, rel=1e-5), 16)


def test_a_loss_that_is_no_number_ends_the_run_with_its_step():
    clock = Clock()
    with pytest.raises(ValueError, match=r"the loss of step 7 is nan .*; try a lower --learning-rate"):
        clock.record(7, {"loss": np.nan, "perplexity": np.nan, "gradient_norm": 1.0, "tokens": 3.0})
