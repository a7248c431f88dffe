"""Drawings of where arrays live: which device holds which piece. For arrays of any rank, and of none yet made."""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import NamedSharding
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table

from shared.config import Config
from shared.model.state import abstract_state
from shared.placement.layout import Layout, abstract_batch
from twinstep.tree import named_leaves


def draw_placement(console: Console, config: Config, layout: Layout) -> None:
    """Draw batch, parameters and optimizer state: of arrays with the same sharding the largest."""
    state = layout.shapes(abstract_state(config), layout.state)
    batch = layout.shapes(abstract_batch(config), layout.batch)
    console.print(f"\n[bold]where arrays live on a mesh of {dict(layout.mesh.shape)}")
    for title, tree in (("batch", batch), ("parameters", state.params), ("optimizer state", state.optimizer)):
        alike: dict[Any, dict[str, Any]] = {}
        for name, leaf in named_leaves(tree).items():
            alike.setdefault(leaf.sharding.spec if any(leaf.sharding.spec) else (), {})[name] = leaf
        for leaves in alike.values():
            console.print(f"\n{heading(title, leaves)}")
            console.print(draw(max(leaves.values(), key=lambda leaf: leaf.size)))


def heading(title: str, leaves: Mapping[str, Any]) -> str:
    """How many arrays there are, which is drawn, and how many bytes of them a device holds."""
    name, largest = max(leaves.items(), key=lambda item: item[1].size)
    held = sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in leaves.values())
    arrays = f"{len(leaves)} array{'s' * (len(leaves) > 1)}"
    return f"{title}: {arrays}, {held:,} bytes on each device, as {name} {list(largest.shape)}"


def draw(array: Any) -> RenderableType:
    """An array, or a shape with a NamedSharding, as a grid of its pieces with the devices that hold each.

    Only dimensions that are sharded appear: the last of them across, the one before it down, and a grid for each
    combination of pieces of the others.
    """
    holders = pieces(array)
    split = [dimension for dimension, ends in enumerate(zip(*holders, strict=True)) if len(set(ends)) > 1]
    if not split:
        return f"  replicated on every device ({numbers(next(iter(holders.values())))})"
    *outer, down, across = [None, *split][-2:] if len(split) < 2 else split
    some_piece = next(iter(holders))

    def ranges(dimension: int | None) -> list[tuple[int, int]]:
        return [(0, 0)] if dimension is None else sorted({piece[dimension] for piece in holders})

    def devices(chosen: Mapping[int | None, tuple[int, int]]) -> str:
        return numbers(holders[tuple(chosen.get(dimension, end) for dimension, end in enumerate(some_piece))])

    drawn: list[RenderableType] = []
    for fixed in itertools.product(*(ranges(dimension) for dimension in outer)):
        chosen = dict(zip(outer, fixed, strict=True))
        if chosen:
            drawn.append("  " + "; ".join(f"dim {dimension}, {span(end)}" for dimension, end in chosen.items()))
        grid = Table(box=box.ASCII2, show_lines=True)
        grid.add_column(f"dim {across}" if down is None else f"dim {down} \\ {across}")
        for column in ranges(across):
            grid.add_column(span(column))
        for row in ranges(down):
            cells = (devices({**chosen, down: row, across: column}) for column in ranges(across))
            grid.add_row("device" if down is None else span(row), *cells)
        drawn.append(grid)
    return Group(*drawn)


def span(end: tuple[int, int]) -> str:
    return f"{end[0]}:{end[1]}"


def pieces(array: Any) -> dict[tuple[tuple[int, int], ...], list[int]]:
    """Each piece of an array, as (first, end) in every dimension, to the ids of the devices that hold it."""
    sharding: NamedSharding = array.sharding
    holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for device, index in sharding.devices_indices_map(array.shape).items():
        piece = tuple(part.indices(size)[:2] for part, size in zip(index, array.shape, strict=True))
        holders.setdefault(piece, []).append(device.id)
    return holders


def numbers(devices: list[int]) -> str:
    """Device ids, neighbours as a range: 0-3, 8."""
    runs: list[list[int]] = []
    for device in sorted(devices):
        if runs and runs[-1][-1] + 1 == device:
            runs[-1].append(device)
        else:
            runs.append([device])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
