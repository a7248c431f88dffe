"""`python -m bench microbench`: what each kind of collective costs on this machine, by size.

Every kind is timed from 1 KiB to 16 MiB, over the devices of this process and between two processes, and a straight
line is fitted: time = latency + bytes sent / bandwidth. Sizes and bandwidths are in the terms of nccl-tests
(twinstep/communication/account.py, `bytes_on_wire`), so that they can be compared with figures from elsewhere.
"""

import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

from bench.timing.local_launcher import run_together
from shared.config import check
from shared.runtime import processes, startup
from shared.runtime.processes import Cluster, wait_for_all
from shared.training.reporter import open_output
from twinstep.communication.account import bytes_on_wire

SIZES = tuple(2**power for power in range(10, 25, 2))
"""Bytes, 1 KiB to 16 MiB, as nccl-tests counts the size: input bytes per device; for all_gather, output bytes."""


def all_reduce(x: Array, axes: Any) -> Array:
    return lax.pcast(lax.psum(x, axes), axes, to="varying")


def all_gather(x: Array, axes: Any) -> Array:
    return lax.all_gather(x, axes, tiled=True)[: x.size]


def reduce_scatter(x: Array, axes: Any) -> Array:
    return lax.dynamic_update_slice(x, lax.psum_scatter(x, axes, tiled=True), (0,))


def all_to_all(x: Array, axes: Any) -> Array:
    return lax.all_to_all(x, axes, 0, 0, tiled=True)


def collective_permute(x: Array, axes: Any) -> Array:
    n = lax.axis_size(axes)
    return lax.ppermute(x, axes, [(i, (i + 1) % n) for i in range(n)])


KINDS: Mapping[str, Callable[[Array, Any], Array]] = {
    function.__name__: function for function in (all_reduce, all_gather, reduce_scatter, all_to_all, collective_permute)
}


@dataclass(frozen=True)
class Cost:
    """One kind over one group of devices: latency and bandwidth, and the times they are fitted to."""

    kind: str
    devices: int
    latency: float
    """Seconds."""
    bandwidth: float
    """Bytes that a device sends in a second: the "bus bandwidth" of nccl-tests, without the latency."""
    seconds: dict[int, float]
    """Size in bytes to time."""

    def predict(self, bytes: float) -> float:
        """Seconds for a collective into which each device puts so many bytes."""
        return self.latency + bytes_on_wire(self.kind, self.devices, bytes) / self.bandwidth


def input_bytes(kind: str, devices: int, size: int) -> int:
    """Input bytes per device of a collective that nccl-tests calls of this size."""
    return size // devices if kind == "all_gather" else size


def repeated(kind: str, mesh: Mesh, axes: tuple[str, ...], size: int) -> tuple[Any, Array, int]:
    """A compiled loop of collectives, each of which waits for the one before, its argument, and its turns."""
    devices = int(np.prod([mesh.shape[axis] for axis in axes]))
    turns = 20 if size <= 2**18 else 4
    length = max(input_bytes(kind, devices, size) // 4, devices)

    def loop(x: Array) -> Array:
        return lax.fori_loop(0, turns, lambda _, x: KINDS[kind](x, axes), x)

    everywhere = P(mesh.axis_names)
    program = jax.jit(jax.shard_map(loop, mesh=mesh, in_specs=everywhere, out_specs=everywhere))
    sharding = NamedSharding(mesh, everywhere)
    shape = (length * mesh.size,)
    x = jax.make_array_from_callback(shape, sharding, lambda index: np.zeros(shape, np.float32)[index])
    return program.lower(x).compile(), x, turns


def measure_costs(
    mesh: Mesh, axes: tuple[str, ...], kinds: Iterable[str], sizes: Sequence[int] = SIZES, rounds: int = 5
) -> list[Cost]:
    """The cost of these kinds over these axes; the sizes are timed interleaved, and the median over rounds counts."""
    devices = int(np.prod([mesh.shape[axis] for axis in axes]))
    found = []
    for kind in kinds:
        programs = {size: repeated(kind, mesh, axes, size) for size in sizes}
        seconds: dict[int, list[float]] = {size: [] for size in sizes}
        for _ in range(rounds + 1):  # the first warms up
            for size, (program, x, turns) in programs.items():
                wait_for_all("kind")
                begin = time.perf_counter()
                jax.block_until_ready(program(x))
                seconds[size].append((time.perf_counter() - begin) / turns)
        medians = {size: float(np.median(times[1:])) for size, times in seconds.items()}
        found.append(Cost(kind, devices, *fit(kind, devices, medians), medians))
    return found


def fit(kind: str, devices: int, seconds: Mapping[int, float]) -> tuple[float, float]:
    """Latency and bandwidth of the line with the least squares of relative errors, neither below zero.

    Relative, as otherwise the largest sizes alone would count.
    """
    times = np.array(list(seconds.values()))
    bytes = np.array([bytes_on_wire(kind, devices, input_bytes(kind, devices, size)) for size in seconds])
    latency, slope = np.linalg.lstsq(np.stack([1 / times, bytes / times], axis=1), np.ones(len(times)), rcond=None)[0]
    return max(float(latency), 0.0), 1 / max(float(slope), 1e-15)


@dataclass(frozen=True)
class MicrobenchCommand:
    """Time every kind of collective by size, in this process and between processes."""

    cluster: Annotated[Cluster, tyro.conf.arg(name="")] = field(default_factory=Cluster)
    devices: int | None = None
    """Devices of one process, by default 8 if they are simulated; between processes each has one."""
    json: Path | None = None
    """File for all that was found, as JSON."""


def run(command: MicrobenchCommand) -> int:
    """Measure here, then between two processes (or --processes); or be one of those. Prints a table for each."""
    alone = (
        command.cluster.coordinator is None and not command.cluster.distributed and processes.launched_processes() == 1
    )
    if not alone:
        found, devices = startup.start_all(command.cluster, command.devices)
    else:
        found = startup.start(command.devices or 8)
        devices = command.devices or found.devices
    check(devices > 1, "one device sends nothing; give --devices 2 or more")
    file = open_output(command.json, "--json") if command.json and processes.is_first() else None
    mesh = jax.make_mesh((devices,), ("devices",), (AxisType.Auto,), devices=jax.devices()[:devices])
    costs = measure_costs(mesh, ("devices",), KINDS)
    data = [{"runtime": dataclasses.asdict(found), "costs": [dataclasses.asdict(cost) for cost in costs]}]
    if processes.is_first():
        print_costs(Console(highlight=False, soft_wrap=True, width=120), found, costs)
    if alone:
        with tempfile.TemporaryDirectory() as folder:
            between = Path(folder) / "between.json"
            together = ["-m", "bench", "microbench", "--json", str(between)]
            print("\n" + run_together(together, command.cluster.processes or 2), end="")
            data += json.loads(between.read_text())
    if file:
        with file:
            json.dump(data, file, indent=2)
    return 0


def print_costs(console: Console, found: startup.Runtime, costs: Sequence[Cost]) -> None:
    """One line for each kind."""
    table = Table(box=None, pad_edge=False)
    for heading in ("kind", "latency", "bandwidth", *(size_name(size) for size in SIZES)):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for cost in costs:
        times = (f"{1e6 * cost.seconds[size]:,.0f}" for size in SIZES)
        table.add_row(cost.kind, f"{1e6 * cost.latency:,.0f} µs", f"{cost.bandwidth / 1e9:.2f} GB/s", *times)
    console.print(found.describe())
    console.print(
        "µs for each size; bytes as in nccl-tests, of which bandwidth counts those that a device sends on a ring"
    )
    console.print(table)


def size_name(size: int) -> str:
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"
