"""The training loop. It holds a twin and never knows which."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

from shared.config import InputError
from shared.data import Batch, Dataset
from shared.loss import summed_loss
from shared.state import TrainState
from shared.twin import Twin


@dataclass(frozen=True)
class Record:
    """What is known of one step once the device has done it."""

    step: int
    """From 1."""
    loss: float
    """Mean over the counted tokens of the global batch, in nats."""
    perplexity: float
    gradient_norm: float
    """Global norm before clipping."""
    tokens: float
    """Counted tokens of this step."""
    tokens_per_second: float | None
    """Over all steps but the first, which compiles."""


def train(twin: Twin, dataset: Callable[[int], Batch], report: Callable[[Record], None]) -> TrainState:
    """Train for the configured number of steps and return the last state.

    Metrics are read one step late: while the host waits for those of step n, the device has step n + 1 to work on.
    Raises ValueError at the first loss that is not a number; what was reported before is kept.
    """
    config = twin.plan.config
    state = twin.init(jax.random.key(config.seed))
    clock = Clock()
    waiting = None
    for step in range(config.steps):
        state, metrics = twin.train_step(state, twin.place_batch(dataset(step)))
        if waiting is not None:
            report(clock.record(*waiting))
        waiting = (step + 1, metrics)
    assert waiting is not None  # there is at least one step
    report(clock.record(*waiting))
    return jax.block_until_ready(state)


class Clock:
    """Turns metrics on the device into records, with the speed since the first step was done."""

    def __init__(self) -> None:
        self.start: float | None = None
        self.tokens = 0.0

    def record(self, step: int, metrics: dict[str, jax.Array]) -> Record:
        """Wait for the metrics of a step and put a time to them."""
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if not math.isfinite(values["loss"]):
            raise InputError(
                f"the loss of step {step} is {values['loss']} (gradient norm {values['gradient_norm']:.3g}); "
                "try a lower --learning-rate, a longer --warmup, or --clip 1"
            )
        now = time.perf_counter()
        if self.start is None:
            self.start = now
            return Record(step, tokens_per_second=None, **values)
        self.tokens += values["tokens"]
        return Record(step, tokens_per_second=self.tokens / (now - self.start), **values)


def evaluate(twin: Twin, state: TrainState, text: np.ndarray, limit: int = 50) -> tuple[float, int]:
    """Mean loss in nats per token over the text's windows in order, or as many as fill `limit` batches, and how many.

    text: bytes as (N,) uint8, longer than a window. The last batch is filled up with windows that do not count.
    """
    size, window = twin.plan.config.batch, twin.plan.config.model.window
    dataset = Dataset(text, window, batch=1)
    windows = min(dataset.windows, limit * size)
    total = jax.jit(summed_loss)
    loss = tokens = 0.0
    for first in range(0, windows, size):
        numbers = np.arange(first, first + size)
        batch = dataset.cut(np.minimum(numbers, windows - 1))
        batch.weights[numbers >= windows] = 0
        placed = twin.place_batch(batch)
        # Read at once: programs with collectives that do not wait for one another can deadlock on simulated devices.
        loss += float(total(twin.logits(state, placed.tokens), placed.targets, placed.weights))
        tokens += float(batch.weights.sum())
    return loss / tokens, windows
