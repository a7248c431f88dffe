"""A trace of a few training steps, and what share of the devices' time in it was communication."""

import re
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from shared.config import InputError
from shared.model.state import TrainState
from shared.training.loop import Action

COLLECTIVE = re.compile(
    "all.reduce|all.gather|reduce.scatter|all.to.all|collective.(permute|broadcast)|psum|pmean|pmax|ppermute"
)
"""Matches names of operations, which XLA takes from the kind of the operation or from its JAX primitive."""

WARM_UP = 2
"""Steps before a profile: one that compiles and one that does not."""

PROFILED = 3
"""Steps traced, after the warm-up steps."""


class Profile:
    """Traces steps `first` to `last` of a run that resumes after `done` steps. Raises ValueError for a bad folder."""

    def __init__(self, folder: Path, done: int):
        self.folder, self.first, self.last = folder, done + WARM_UP + 1, done + WARM_UP + PROFILED
        self.report = ""
        """The line to print once the trace is done."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise InputError(
                f"cannot write a profile to {folder}: {error.strerror}; give --profile a folder to write to"
            ) from None

    def actions(self) -> list[Action]:
        """Return what the training loop has to do, which waits for the device before each."""
        return [
            Action(lambda done: done == self.first - 1, self.begin),
            Action(lambda done: done == self.last, self.end),
        ]

    def begin(self, done: int, state: TrainState) -> None:
        jax.block_until_ready(state)
        jax.profiler.start_trace(self.folder)

    def end(self, done: int, state: TrainState) -> None:
        jax.block_until_ready(state)
        jax.profiler.stop_trace()
        files = sorted(self.folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
        times = operation_times(files[-1])
        total = sum(times.values())
        sent = sum(time for name, time in times.items() if COLLECTIVE.search(name))
        share = f"{sent / total:.0%} of the devices' busy time is collectives" if total else "no operation is in it"
        self.report = (
            f"profile of steps {self.first} to {self.last} in {self.folder}: {share}"
            + (" (on a CPU, mostly waiting for one another)" if jax.default_backend() == "cpu" and sent else "")
            + "; docs/training.md says how to open it"
        )


def operation_times(path: Path) -> Counter[str]:
    """Return the nanoseconds spent in each XLA operation, by name, summed over devices, from a .xplane.pb file.

    A loop's event spans those of its body: each event counts without the events inside it.
    """
    times: Counter[str] = Counter()
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            times.update(own_times(line.events))
    return times


def own_times(events: Iterable[Any]) -> Counter[str]:
    """Return the same for the events of one thread or stream, which are nested or disjoint."""
    times: Counter[str] = Counter()
    found = [(event.start_ns, -event.duration_ns, operation(event)) for event in events]
    around: list[tuple[float, str]] = []  # (end, name) of the events that enclose this one
    for start, negative, name in sorted(event for event in found if event[2]):
        while around and around[-1][0] <= start:
            around.pop()
        times[name] -= negative
        if around:
            times[around[-1][1]] += negative
        around.append((start - negative, name))
    return times


def operation(event: Any) -> str:
    """Return the name of the XLA operation that an event ran; empty for other events."""
    return next((str(value) for name, value in event.stats if name == "hlo_op"), "")
