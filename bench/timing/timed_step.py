"""Time of compiled steps, in one process, interleaved.

On a shared machine a time means little by itself, and two times taken one after the other hardly more. So all steps
that are to be compared run interleaved, and their ratio is the median over rounds of the ratio within a round.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from bench import TWINS
from bench.timing.compute_only import compile_compute_only
from shared.config import Config
from shared.data.batches import Batch, Dataset
from shared.data.corpus import read_corpus
from shared.placement.mesh import make_mesh
from shared.runtime.keys import random_key
from shared.runtime.processes import wait_for_all
from twinstep import collectives
from twinstep.communication.compiled import compile_readable
from twinstep.communication.entries import Collective
from twinstep.communication.memory import Memory, memory

TIMED_STEPS = ("auto", "explicit", "compute only")


@dataclass
class TimedStep:
    """A compiled training step with a state and a batch that are on the devices already."""

    step: jax.stages.Compiled
    state: Any
    batch: Any
    loss: float = math.nan
    """Of the last step."""
    sends: list[Collective] = field(default_factory=list)
    """Its collectives."""
    memory: Memory | None = None
    """What it takes on each device."""

    def run(self, steps: int = 1) -> None:
        """Train for so many steps, and wait until the devices have done them."""
        for _ in range(steps):
            self.state, metrics = self.step(self.state, self.batch)
        self.loss = float(jax.block_until_ready(metrics["loss"]))
        jax.block_until_ready(self.state)


def timed_step(name: str, config: Config, devices: int) -> TimedStep:
    """Compile one of TIMED_STEPS and place what it needs; it has run twice, so nothing is left to warm up."""
    if name == "compute only":
        twin, step = compile_compute_only(config, devices)
    else:
        twin = TWINS[name](config, make_mesh(config.strategy, devices, config.mesh))
        step = compile_readable(twin.train_step, *twin.shapes())
    state, batch = twin.init(random_key(config.seed)), twin.place_batch(timed_batch(config))
    made = TimedStep(step, state, batch, sends=collectives(step, mesh=twin.mesh), memory=memory(step))
    made.run(2)
    return made


def timed_batch(config: Config) -> Batch:
    """The batch that all steps are timed with. Raises ValueError for sizes that the built-in text is too short for."""
    return Dataset(read_corpus("python-docs"), config.model.seq_len, config.batch, config.seed)(0)


def interleaved(timed_steps: Mapping[Any, TimedStep], rounds: int, steps: int = 1) -> dict[Any, np.ndarray]:
    """Seconds per step of each, (rounds,). Rounds begin with different ones, as the first may pay for the last."""
    names = list(timed_steps)
    seconds: dict[Any, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            wait_for_all("turn")
            begin = time.perf_counter()
            timed_steps[name].run(steps)
            seconds[name].append((time.perf_counter() - begin) / steps)
    return {name: np.array(values) for name, values in seconds.items()}


def median_ratio(numerator: np.ndarray, denominator: np.ndarray) -> float:
    """Median over rounds of the ratio within a round."""
    return float(np.median(numerator / denominator))
