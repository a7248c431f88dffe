"""`python -m bench ledger`: what one training step sends, in both twins: predicted, compiled, and measured.

Predicted by the strategy table's formula, found in the compiled programs, matched with each other, and timed: by a
profile of real steps, beside the time that the cost of each kind on this machine (`microbench`) leads to expect.
"""

import dataclasses
import json
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from rich.console import Console
from rich.table import Table

from bench.ledger.microbench import Cost, measure_costs
from bench.ledger.report import Account, account, as_data, print_account
from bench.timing.timed_step import TIMED_STEPS, TimedStep, interleaved, timed_batch, timed_step
from shared.config import Config, check
from shared.placement.layout import layout
from shared.placement.mesh import make_mesh
from shared.runtime import startup
from shared.training.profiling import operation_times
from shared.training.reporter import open_output
from twinstep.communication.entries import Collective

STEPS = 5
"""Steps in a profile."""
SIZES = tuple(2**power for power in range(12, 25, 4))
"""Sizes at which the cost of a kind is measured here; `python -m bench microbench` takes more."""
OPERATIONS = {
    "all_reduce": re.compile("all.reduce|psum|pmean|pmax"),
    "all_gather": re.compile("all.gather"),
    "reduce_scatter": re.compile("reduce.scatter"),
    "all_to_all": re.compile("all.to.all"),
    "collective_permute": re.compile("collective.permute|ppermute"),
}
"""What operations of a kind are called in profiles: by XLA, or after the JAX primitive in the source."""


@dataclass(frozen=True)
class LedgerCommand:
    """What one training step of both twins sends, and what that costs here."""

    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)
    devices: int = 8
    """Devices of the mesh."""
    measure: bool = True
    """Time the collectives as well."""
    json: Path | None = None
    """File for all that was found, as JSON."""


def profiled(step: TimedStep, devices: int) -> dict[str, dict[str, float]]:
    """Kind to operation of the compiled program to the seconds that a device spends in it in one step, on average.

    Waiting for others is included.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            step.run(STEPS)
        (file,) = Path(folder).rglob("*.xplane.pb")
        times = operation_times(file)
    found: dict[str, dict[str, float]] = {}
    for kind, named in OPERATIONS.items():
        own = {name: time / 1e9 / devices / STEPS for name, time in times.items() if named.search(name)}
        if own:
            found[kind] = own
    return found


def costs_of(compiled: Iterable[Collective], mesh: jax.sharding.Mesh) -> dict[tuple[str, tuple[str, ...]], Cost]:
    """The cost here of each kind over the axes over which these collectives are."""
    found = {}
    for kind, axes in dict.fromkeys((c.kind, c.axes) for c in compiled if c.axes and c.kind in OPERATIONS):
        (found[kind, axes],) = measure_costs(mesh, axes, [kind], SIZES, rounds=3)
    return found


def expected(entries: Iterable[Collective], costs: Mapping[Any, Cost]) -> float:
    """Seconds for these collectives, one after the other, by the cost of their kinds."""
    return sum((c.count or 1) * costs[c.kind, c.axes].predict(c.bytes) for c in entries if (c.kind, c.axes) in costs)


def run(command: LedgerCommand) -> int:
    """Print the ledger; return 0 if both compiled programs send what the strategy table predicts, 1 otherwise."""
    config = command.config
    found = startup.start(command.devices, float64="float64" in (config.model.dtype, config.model.param_dtype))
    mesh = make_mesh(config.strategy, command.devices, config.mesh)
    layout(config, mesh)  # fail early on sizes that do not divide
    timed_batch(config)
    check(command.devices > 1, "one device sends nothing; give --devices 2 or more")
    file = open_output(command.json, "--json") if command.json else None
    console = Console(highlight=False, soft_wrap=True, width=None if Console().is_terminal else 140)
    console.print(found.describe())
    names = TIMED_STEPS if command.measure else TIMED_STEPS[:2]
    steps = {name: timed_step(name, config, command.devices) for name in names}
    book = account(config, command.devices, {name: steps[name].sends for name in ("auto", "explicit")})
    print_account(console, config, command.devices, book)
    data: dict[str, Any] = {"runtime": dataclasses.asdict(found), "config": dataclasses.asdict(config)}
    data |= {"devices": command.devices, **as_data(book)}
    if command.measure:
        costs = costs_of([c for sends in book.compiled.values() for c in sends], mesh)
        times = {name: profiled(steps[name], command.devices) for name in book.compiled}
        seconds = interleaved(steps, rounds=10)
        bare = seconds["compute only"]
        beyond = {name: float(jax.numpy.median(seconds[name] - bare)) for name in book.compiled}
        print_times(console, book, costs, times, beyond)
        data["measured"] = {
            "costs": {
                f"{kind} over {', '.join(axes)}": dataclasses.asdict(cost) for (kind, axes), cost in costs.items()
            },
            "expected_seconds": {name: expected(sends, costs) for name, sends in book.compiled.items()},
            "profiled_seconds": times,
            "seconds_beyond_compute_only": beyond,
        }
    if file:
        with file:
            json.dump(data, file, indent=2)
    return 0 if all(book.as_predicted.values()) else 1


def total(*found: Mapping[str, float]) -> float:
    return sum(time for operations in found for time in operations.values())


def print_times(
    console: Console,
    book: Account,
    costs: Mapping[tuple[str, tuple[str, ...]], Cost],
    times: Mapping[str, Mapping[str, Mapping[str, float]]],
    beyond: Mapping[str, float],
) -> None:
    """What communication should cost by the price of its kinds, and what it was measured to."""
    console.print("\n[bold]cost of these kinds here")
    for (kind, axes), cost in costs.items():
        console.print(
            f"{kind} over {', '.join(axes)} ({cost.devices} devices): {1e6 * cost.latency:,.0f} µs + bytes sent / "
            f"{cost.bandwidth / 1e9:.2f} GB/s"
        )
    table = Table("communication of a step", *book.compiled, box=None, pad_edge=False)
    rows: dict[str, Mapping[str, float]] = {
        "expected from cost and bytes": {name: expected(sends, costs) for name, sends in book.compiled.items()},
        "in the profile, waiting included": {name: total(*found.values()) for name, found in times.items()},
        "step, beyond the compute-only step": beyond,
    }
    for kind in dict.fromkeys(kind for found in times.values() for kind in found):
        rows[f"  of the profile: {kind}"] = {name: total(found.get(kind, {})) for name, found in times.items()}
    for heading, values in rows.items():
        table.add_row(heading, *(f"{1e3 * values[name]:.2f} ms" for name in book.compiled))
    console.print()
    console.print(table)
    for match in book.matches:
        if match.verdict != "the same":
            explicit, auto = (1e3 * expected(side, costs) for side in (match.first, match.second))
            console.print(
                f"{match.verdict}: {explicit:.2f} ms in explicit, {auto:.2f} ms in auto, expected from cost and bytes"
            )
