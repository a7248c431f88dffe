"""Every strategy's memory and communication on one model: `python -m bench.strategies`. The figures in docs/ are its.

Nothing runs: steps are compiled for 8 devices, and their programs read.
"""

from collections.abc import Iterator

import jax
from rich.console import Console
from rich.table import Table

from bench import DEVICE_COUNTS, TWINS
from shared import runtime
from shared.collectives import collectives, compile_readable
from shared.config import Config, ModelConfig
from shared.memory import memory
from shared.placement import STRATEGIES, make_mesh

DEVICES = DEVICE_COUNTS[-1]


def config(strategy: str) -> Config:
    """A model whose activations, parameters and optimizer state all weigh something."""
    return Config(
        model=ModelConfig(layers=4, width=256, heads=8, hidden=1024, window=256, unroll=1), batch=32, strategy=strategy
    )


def row(strategy: str, name: str) -> tuple[str, ...]:
    """Cells of one line of the table."""
    twin = TWINS[name](config(strategy), make_mesh(strategy, DEVICES))
    step = compile_readable(twin.train_step, *twin.shapes())
    sends: dict[str, int] = {}
    for found in collectives(step, twin.mesh):
        sends[found.kind] = sends.get(found.kind, 0) + found.total_bytes
    planned = memory(step)
    sizes = (f"{size / 2**20:.1f}" for size in (planned.arguments, planned.temporary, planned.peak))
    sent = ", ".join(f"{kind} {size / 2**20:.1f}" for kind, size in sorted(sends.items()) if size >= 2**15)
    return strategy, name, *sizes, f"{sum(sends.values()) / 2**20:.1f}", sent


def rows() -> Iterator[tuple[str, ...]]:
    for strategy in STRATEGIES:
        for name in TWINS:
            yield row(strategy, name)


def main() -> None:
    runtime.start(DEVICES)
    console = Console(highlight=False, soft_wrap=True, width=160)
    table = Table("strategy", "twin", "arguments", "temporary", "peak", "sent", "of these", box=None)
    for cells in rows():
        table.add_row(*cells)
    console.print(runtime.STARTED[0].describe())
    console.print(table)
    console.print(f"MiB on each of {jax.device_count()} devices; what is sent: put in by each in one step")


if __name__ == "__main__":
    main()
