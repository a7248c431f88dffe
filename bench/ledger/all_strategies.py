"""`python -m bench strategies`: what every strategy holds and sends, on one model. The figures in docs/ are its.

Nothing runs: steps are compiled for the devices there are, and their programs read.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from rich.console import Console
from rich.table import Table

from bench import DEVICE_COUNTS, TWINS
from shared.config import Config, ModelConfig
from shared.placement.layout import layout
from shared.placement.mesh import make_mesh
from shared.placement.strategies import STRATEGIES
from shared.placement.traffic import predicted_traffic, traffic_totals
from shared.runtime import startup
from shared.training.reporter import open_output
from twinstep import collectives
from twinstep.communication.account import total_on_wire, totals
from twinstep.communication.compiled import compile_readable
from twinstep.communication.memory import memory

MODEL = Config(model=ModelConfig(layers=4, d_model=256, heads=8, d_ff=1024, seq_len=256, unroll=1), batch=32)
"""A model whose activations, parameters and optimizer state all weigh something."""


@dataclass(frozen=True)
class StrategiesCommand:
    """Memory and communication of one training step of every strategy, in both twins, read from compiled programs."""

    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=lambda: MODEL)
    devices: int = DEVICE_COUNTS[-1]
    """Devices of the mesh."""
    json: Path | None = None
    """File for all that was found, as JSON."""


def plan(config: Config, name: str, devices: int) -> dict[str, Any]:
    """One twin's step of one strategy: bytes on a device, and input bytes of its collectives by kind."""
    twin = TWINS[name](config, make_mesh(config.strategy, devices))
    step = compile_readable(twin.train_step, *twin.shapes())
    sends = collectives(step, mesh=twin.mesh)
    predicted = predicted_traffic(config, twin.mesh.shape, name)
    kinds: dict[str, float] = {}
    for (kind, _), total in totals(sends).items():
        kinds[kind] = kinds.get(kind, 0) + total.least
    return {
        "strategy": config.strategy,
        "twin": name,
        **dataclasses.asdict(memory(step)),
        "input_bytes": kinds,
        "bytes_on_wire": total_on_wire(sends).least,
        "as_predicted": None if predicted is None else traffic_totals(predicted) == totals(sends),
    }


def run(command: StrategiesCommand) -> int:
    """Print the table; return 0 if every step sends what is predicted of it, 1 otherwise."""
    found = startup.start(command.devices)
    configs = [dataclasses.replace(command.config, strategy=strategy) for strategy in STRATEGIES]
    for config in configs:  # fail early on sizes that do not divide
        layout(config, make_mesh(config.strategy, command.devices))
    file = open_output(command.json, "--json") if command.json else None
    rows = [plan(config, name, command.devices) for config in configs for name in TWINS]
    console = Console(highlight=False, soft_wrap=True, width=180)
    console.print(found.describe())
    print_strategies(console, rows)
    if file:
        with file:
            json.dump({"runtime": dataclasses.asdict(found), "rows": rows}, file, indent=2)
    return 0 if all(row["as_predicted"] in (True, None) for row in rows) else 1


def print_strategies(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """One line for each strategy and twin, in MiB on each device."""
    table = Table(box=None, pad_edge=False)
    sizes = ("arguments", "temporary", "peak")
    for heading in ("strategy", "twin", *sizes, "input", "as predicted", "of these"):
        table.add_column(heading, justify="right" if heading in (*sizes, "input") else "left")
    for row in rows:
        held = (f"{row[size] / 2**20:.1f}" for size in sizes)
        kinds = ", ".join(f"{kind} {bytes / 2**20:.1f}" for kind, bytes in row["input_bytes"].items() if bytes >= 2**15)
        kept = {True: "yes", False: "[red]NO", None: "not predicted"}[row["as_predicted"]]
        total = f"{sum(row['input_bytes'].values()) / 2**20:.1f}"
        table.add_row(row["strategy"], row["twin"], *held, total, kept, kinds)
    console.print(table)
    console.print(f"MiB on each of {jax.device_count()} devices; input: of a device's collectives in one step")
