"""The training loop, which is the same for both twins."""

import functools
import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shared.config import InputError
from shared.data.batches import Batch, Dataset
from shared.model.loss import summed_loss
from shared.model.state import TrainState
from shared.placement.placing import local_rows
from shared.runtime.keys import random_key
from shared.twin import Twin


@dataclass(frozen=True)
class Record:
    """The metrics of one step once the device has done it."""

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
    """Over all steps of this run but the first, which compiles, without the time of evaluating and saving."""


@dataclass(frozen=True)
class Action:
    """Something to do between two steps, while the device waits: evaluate, save, begin or end a profile."""

    due: Callable[[int], bool]
    """Whether it is due once this many steps are done."""
    do: Callable[[int, TrainState], None]
    """(steps done, state). The state's arrays are gone once the next step is dispatched."""


def every(steps: int, last: int) -> Callable[[int], bool]:
    """Return a predicate that is true every `steps` steps (0: never) and after the last one."""
    return lambda done: done == last or (steps > 0 and done % steps == 0)


def train(
    twin: Twin,
    dataset: Callable[..., Batch],
    report: Callable[[Record], None],
    *,
    start: TrainState | None = None,
    actions: Sequence[Action] = (),
    stop: Callable[[int], bool] = lambda done: False,
) -> TrainState:
    """Train up to the configured number of steps and return the last state.

    start: a state to resume from (its arrays are donated); by default that of step 0. actions: run in this order when
    due. stop: called after every step with the number of steps done; True ends the run there.
    Metrics are read one step late: while the host waits for those of step n, the device runs step n + 1.
    Raises ValueError at the first loss that is not finite; earlier records have been reported.
    """
    config = twin.plan.config
    rows = local_rows(twin.plan.layout, config.batch)
    state = twin.init(random_key(config.seed)) if start is None else start
    clock = Clock()
    waiting: list[tuple[int, dict[str, jax.Array]]] = []

    def report_waiting() -> None:
        while waiting:
            report(clock.record(*waiting.pop(0)))

    for done in range(int(state.step) + 1, config.steps + 1):
        state, metrics = twin.train_step(state, twin.place_batch(dataset(done - 1, rows)))
        report_waiting()
        waiting.append((done, metrics))
        due = [action for action in actions if action.due(done)]
        if due:
            report_waiting()
            with clock.paused():
                for action in due:
                    action.do(done, state)
        if stop(done):
            break
    report_waiting()
    return jax.block_until_ready(state)


class Clock:
    """Turns metrics on the device into records, with the speed since the end of the first step."""

    def __init__(self) -> None:
        self.start: float | None = None
        self.tokens = 0.0

    @contextmanager
    def paused(self) -> Generator[None]:
        """Exclude the time spent in this context."""
        begin = time.perf_counter()
        yield
        if self.start is not None:
            self.start += time.perf_counter() - begin

    def record(self, step: int, metrics: dict[str, jax.Array]) -> Record:
        """Wait for the metrics of a step and add the speed."""
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
    """Return the mean loss in nats per token over the first windows of a text, and the number of windows.

    text: bytes as (N,) uint8, longer than a window. limit: most batches to evaluate. The last batch is padded with
    windows of weight 0.
    """
    size, window = twin.plan.config.batch, twin.plan.config.model.seq_len
    dataset = Dataset(text, window, batch=1)
    windows = min(dataset.windows, limit * size)
    rows = local_rows(twin.plan.layout, size)
    loss = tokens = 0.0
    for first in range(0, windows, size):
        numbers = np.arange(first, first + size)
        batch = dataset.cut(np.minimum(numbers, windows - 1), rows)
        batch.weights[numbers[rows] >= windows] = 0
        placed = twin.place_batch(batch)
        # Read at once: programs with collectives that do not wait for one another can deadlock on simulated devices.
        sums = total_loss()(twin.logits(state, placed.tokens), placed.targets, placed.weights)
        loss, tokens = loss + float(sums[0]), tokens + float(sums[1])
    return loss / tokens, windows


@functools.cache
def total_loss() -> Any:
    """Compile (logits, targets, weights) to the sum of their losses and the number of counted tokens."""
    return jax.jit(lambda *batch: (summed_loss(*batch), jnp.sum(batch[-1])))
