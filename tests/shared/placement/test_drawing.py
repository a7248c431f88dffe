"""Drawings of placement, for arrays of any rank."""

import io

import jax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from shared.placement.drawing import draw, draw_placement, numbers, pieces
from shared.placement.layout import layout
from shared.placement.mesh import make_mesh
from tests.small import small_config


def printed(shape: tuple[int, ...], spec: P) -> list[str]:
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), (AxisType.Auto,) * 3)
    array = jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, spec))
    file = io.StringIO()
    Console(file=file, width=100).print(draw(array))
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in file.getvalue().splitlines()]
    return [" ".join(filter(None, row)) for row in cells if not row[0].startswith("+")]


DRAWINGS = {
    "scalar": ((), P(), ["replicated on every device (0-7)"]),
    "replicated": ((4, 4), P(), ["replicated on every device (0-7)"]),
    "rank 1": ((8,), P("c"), ["dim 0 0:4 4:8", "device 0, 2, 4, 6 1, 3, 5, 7"]),
    "rank 2, two axes in one dimension": (
        (4, 8),
        P(None, ("a", "b")),
        ["dim 1 0:2 2:4 4:6 6:8", "device 0-1 2-3 4-5 6-7"],
    ),
    "rank 4": ((2, 4, 6, 4), P(None, "a", None, "b"), ["dim 1 \\ 3 0:2 2:4", "0:2 0-1 2-3", "2:4 4-5 6-7"]),
    "rank 3, all split": (
        (4, 6, 8),
        P("a", "b", "c"),
        [
            *("dim 0, 0:2", "dim 1 \\ 2 0:4 4:8", "0:3 0 1", "3:6 2 3"),
            *("dim 0, 2:4", "dim 1 \\ 2 0:4 4:8", "0:3 4 5", "3:6 6 7"),
        ],
    ),
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_drawings(name: str):
    shape, spec, expected = DRAWINGS[name]
    assert printed(shape, spec) == expected


def test_every_piece_is_on_the_devices_that_hold_it():
    mesh = jax.make_mesh((2, 4), ("a", "b"), (AxisType.Auto,) * 2)
    array = jax.device_put(jax.numpy.zeros((8, 4, 2)), NamedSharding(mesh, P("b", None, "a")))
    for shard in array.addressable_shards:
        piece = tuple(part.indices(size)[:2] for part, size in zip(shard.index, array.shape, strict=True))
        assert shard.device.id in pieces(array)[piece]


def test_numbers():
    assert numbers([3, 1, 2, 7, 9, 10]) == "1-3, 7, 9-10"


def test_placement_of_a_run():
    config = small_config()
    file = io.StringIO()
    draw_placement(Console(file=file, width=200), config, layout(config, make_mesh(config.strategy, 4)))
    for part in (
        "a mesh of {'data': 4}",
        "batch: 4 arrays, 200 bytes on each device, as tokens [8, 8]",
        "2:4",
        "parameters: 21 arrays",
        "optimizer state: 44 arrays",
        "replicated on every device (0-3)",
    ):
        assert part in file.getvalue()
