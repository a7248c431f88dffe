"""`python -m bench processes`: what communication between processes costs, and what buckets save.

Between processes (gloo on CPUs) every array of an all-reduce is a message of its own. The explicit step joins its
gradients into flat buckets; here it is timed with and without them, beside the auto step, and beside the explicit step
with its collectives made local. On a machine by itself this starts the processes; under a launcher it is one of them.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from bench.timing.local_launcher import run_together
from bench.timing.timed_step import TimedStep, interleaved, median_ratio, timed_step
from shared.config import Config, check
from shared.runtime import processes, startup
from shared.runtime.processes import Cluster
from shared.training.reporter import open_output
from twinstep.communication.account import total_bytes

BARE = "explicit, sending nothing"


@dataclass(frozen=True)
class ProcessesCommand:
    """Time both twins between processes, with and without buckets and communication."""

    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)
    cluster: Annotated[Cluster, tyro.conf.arg(name="")] = field(default_factory=Cluster)
    devices: int | None = None
    """Devices over all processes; by default all there are, or one simulated device in each process."""
    rounds: int = 20
    """Rounds of interleaved timing of all steps."""
    json: Path | None = None
    """File for all that was found, as JSON."""


def run(command: ProcessesCommand) -> int:
    """Start two processes (or --processes), or be one of those that measure; print the table; return the exit code."""
    check(command.rounds >= 1, f"rounds is {command.rounds}; give at least 1")
    by_hand = command.cluster.coordinator is not None
    if not by_hand and not command.cluster.distributed and processes.launched_processes() == 1:
        print(run_together(["-m", "bench", *sys.argv[1:]], command.cluster.processes or 2), end="")
        return 0
    found, devices = startup.start_all(command.cluster, command.devices)
    file = open_output(command.json, "--json") if command.json and processes.is_first() else None
    rows = time_forms(command.config, devices, command.rounds)
    if processes.is_first():
        print_forms(Console(highlight=False, soft_wrap=True, width=120), found, rows)
        if file:
            with file:
                json.dump({"runtime": dataclasses.asdict(found), "rows": rows}, file, indent=2)
    return 0


def time_forms(config: Config, devices: int, rounds: int) -> list[dict[str, Any]]:
    """Time every form of the step, interleaved, in all processes together."""
    forms: dict[str, tuple[str, Config]] = {
        "auto": ("auto", config),
        "explicit, in buckets": ("explicit", config),
        "explicit, leaf by leaf": ("explicit", dataclasses.replace(config, bucket_bytes=0)),
        BARE: ("compute only", config),
    }
    timed_steps: dict[str, TimedStep] = {name: timed_step(kind, form, devices) for name, (kind, form) in forms.items()}
    seconds = interleaved(timed_steps, rounds, steps=5)
    return [
        {
            "step": name,
            "arrays": sum(collective.arrays for collective in made.sends),
            "bytes": total_bytes(made.sends).least,
            "seconds": float(seconds[name].min()),
            "over_sending_nothing": median_ratio(seconds[name], seconds[BARE]),
            "loss": made.loss,
        }
        for name, made in timed_steps.items()
    ]


def print_forms(console: Console, found: startup.Runtime, rows: Sequence[dict[str, Any]]) -> None:
    """One line for each form of the step."""
    table = Table("step", "arrays sent", "bytes", "fastest", "over sending nothing", "loss", box=None, pad_edge=False)
    for row in rows:
        table.add_row(
            row["step"],
            str(row["arrays"]),
            f"{row['bytes']:,}",
            f"{1e3 * row['seconds']:.1f} ms",
            f"{row['over_sending_nothing']:.2f}",
            "" if row["step"] == BARE else f"{row['loss']:.5f}",
        )
    console.print(found.describe())
    console.print(table)
