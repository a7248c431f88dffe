"""`python -m bench compare`: are the two twins the same step, what do they send, and what does that cost?

For 1, 2, 4 and 8 devices, as far as there are devices: the largest difference of loss, logits, gradients and updated
parameters between the single-device step, the auto twin and the explicit twin, in float32 and float64 (bench/proof);
the collectives of both; and the time of both beside that of the explicit step without communication, for the
configuration given, by default the training command's (bench/timing/timed_step.py).
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from bench import DEVICE_COUNTS, TWINS, device_counts
from bench.comparison.report import Row, print_report
from bench.ledger.report import account
from bench.ledger.report import as_data as ledger_data
from bench.proof.prove import proof_config, prove
from bench.proof.trajectories import trajectories
from bench.timing.timed_step import TIMED_STEPS, interleaved, median_ratio, timed_batch, timed_step
from shared.config import Config, DType, check
from shared.placement.drawing import draw_placement
from shared.placement.layout import layout
from shared.placement.mesh import make_mesh
from shared.runtime import startup
from shared.training.reporter import open_output
from twinstep.equivalence.report import Report

DTYPES: tuple[DType, ...] = ("float32", "float64")


@dataclass(frozen=True)
class CompareCommand:
    """Compare the two twins: equality, collectives, and time, for 1, 2, 4 and 8 devices."""

    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)
    rounds: int = 6
    """Rounds of interleaved timing of all steps."""
    json: Path | None = None
    """File for all that was found, as JSON."""


def time_steps(config: Config, counts: Sequence[int], rounds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Time all steps on each number of devices, interleaved: the measured fields of each Row."""
    timed_steps = {}
    for devices, name in itertools.product(counts, TIMED_STEPS):
        if devices == 1 and name == "compute only":
            continue  # one device sends nothing anyway
        say(f"compiling the timed step: {name} on {devices}")
        timed_steps[devices, name] = timed_step(name, config, devices)
    say(f"timing {len(timed_steps)} steps, interleaved")
    seconds = interleaved(timed_steps, rounds)
    found = []
    for devices in counts:
        own = {name: seconds[devices, name] for name in TIMED_STEPS if (devices, name) in seconds}
        bare = own.get("compute only")
        found.append(
            {
                "book": account(config, devices, {name: timed_steps[devices, name].sends for name in TWINS}),
                "memory": {name: timed_steps[devices, name].memory for name in TWINS},
                "seconds": {name: float(values.min()) for name, values in own.items()},
                "losses": {name: timed_steps[devices, name].loss for name in TWINS},
                "explicit_over_auto": median_ratio(own["explicit"], own["auto"]),
                "communication_share": {
                    name: 0.0 if bare is None else 1 - median_ratio(bare, own[name]) for name in TWINS
                },
            }
        )
    return found


def prove_tiers(
    strategy: str, mesh: str, counts: Sequence[int], say: Callable[[str], None]
) -> dict[int, dict[str, dict[str, Report]]]:
    """Number of devices to tier to pair to report; the longer tiers on the largest number only."""
    found: dict[int, dict[str, dict[str, Report]]] = {devices: {} for devices in counts}
    for dtype in DTYPES:
        for devices, pairs in prove(proof_config(dtype, strategy, mesh), counts, say).items():
            found[devices][dtype] = pairs
    most = found[counts[-1]]
    most |= {"bfloat16": prove(proof_config("bfloat16", strategy, mesh), counts[-1:], say)[counts[-1]]}
    for name, optimizer in {"SGD": "sgd", "Adam (smoke)": "adamw"}.items():
        say(f"proving a trajectory of {optimizer} on {counts[-1]}")
        most[f"trajectory, {name}"] = trajectories(optimizer, strategy, counts[-1], mesh)
    return found


def run(command: CompareCommand) -> int:
    """Compare, print, and return the exit code: 0 if every row is equal and sends what is predicted, 1 otherwise."""
    config = command.config
    check(command.rounds >= 1, f"rounds is {command.rounds}; give at least 1")
    found = startup.start(DEVICE_COUNTS[-1], float64="float64" in (config.model.dtype, config.model.param_dtype))
    console = Console(highlight=False, soft_wrap=True, width=None if Console().is_terminal else 140)
    counts = device_counts(found.devices)
    if config.mesh:
        counts = counts[-1:]
    places = layout(
        config, make_mesh(config.strategy, counts[-1], config.mesh)
    )  # fail early on sizes that do not divide
    timed_batch(config)
    file = open_output(command.json, "--json") if command.json else None

    with console.status("starting") as status:
        say = functools.partial(progress, console, status)
        proofs = prove_tiers(config.strategy, config.mesh, counts, say)
        measured = time_steps(config, counts, command.rounds, say)
    rows = [Row(devices, proofs[devices], **values) for devices, values in zip(counts, measured, strict=True)]
    console.print(found.describe())
    draw_placement(console, config, places)
    print_report(console, rows, config, proof_config("float32", config.strategy))
    if file:
        with file:
            json.dump(as_data(rows, found, config), file, indent=2)
    return 0 if all(row.equal and row.as_predicted for row in rows) else 1


def progress(console: Console, status: Any, message: str) -> None:
    """Say what is going on: in place on a terminal, as lines elsewhere."""
    if console.is_terminal:
        status.update(message)
    else:
        print(message, flush=True)


def as_data(rows: Sequence[Row], found: startup.Runtime, config: Config) -> dict[str, Any]:
    """The report as JSON-ready data."""

    def proof(report: Report) -> dict[str, Any]:
        groups = dict.fromkeys(leaf.group for leaf in report.leaves)
        return {
            "equal": report.equal,
            "problems": report.problems,
            "worst": {group: report.worst(group).name for group in groups},
            "leaves": [{**dataclasses.asdict(leaf), "used": leaf.used} for leaf in report.leaves],
        }

    return {
        "runtime": dataclasses.asdict(found),
        "config": dataclasses.asdict(config),
        "equal": all(row.equal for row in rows),
        "rows": [
            {
                "devices": row.devices,
                "equal": row.equal,
                "as_predicted": row.as_predicted,
                "proofs": {
                    dtype: {pair: proof(report) for pair, report in pairs.items()}
                    for dtype, pairs in row.proofs.items()
                },
                "ledger": ledger_data(row.book),
                "memory": {name: dataclasses.asdict(held) for name, held in row.memory.items()},
                "seconds": row.seconds,
                "losses": row.losses,
                "explicit_over_auto": row.explicit_over_auto,
                "communication_share": row.communication_share,
            }
            for row in rows
        ],
    }
