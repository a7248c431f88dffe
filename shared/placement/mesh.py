"""The mesh of a strategy."""

from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from shared.config import check
from shared.placement.strategies import find_strategy, read_mesh


def make_mesh(strategy: str, devices: Sequence[jax.Device] | int, degrees: str = "") -> Mesh:
    """The strategy's mesh over these devices, or over the first so many of `jax.devices()`.

    degrees: axes and degrees in place of the strategy's own, as in `data=2,tensor=4` (`Config.mesh`).

    The axes are `Auto` ones, by name: `jax.make_mesh` alone would make `Explicit` ones. Under `jit` the compiler
    then decides about communication, and `shard_map` turns them into manual ones, where it decides nothing.
    Raises ValueError if there are fewer devices than that, or degrees with another product.
    """
    if isinstance(devices, int):
        there = jax.devices()
        check(devices >= 1, f"devices is {devices}; give at least 1")
        check(
            devices <= len(there),
            f"{devices} devices are needed, but there are {len(there)} ({there[0].platform}); "
            f"give --devices {len(there)} or fewer",
        )
        devices = there[:devices]
    sizes = read_mesh(degrees, len(devices)) if degrees else find_strategy(strategy).mesh_shape(len(devices))
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), kinds, devices=list(devices))
