"""The strategy table, and where every array of a strategy lives.

Placement is shared knowledge: from the same rules the auto twin takes its `NamedSharding`s and the explicit twin its
`in_specs` and `out_specs`. Who communicates is what differs. Tests, benchmarks, command line and docs read this table.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shared.config import Config, check, validate
from shared.data import Batch
from shared.decoding import Cache, abstract_cache
from shared.state import abstract_state
from shared.tree import leaf_name


class Traffic(NamedTuple):
    """All collectives of one kind over the same mesh axes in one training step."""

    kind: str
    """As in shared/collectives.py."""
    axes: tuple[str, ...]
    """In the mesh's order."""
    bytes: int
    """Bytes that each device puts in, over all of them."""


@dataclass(frozen=True)
class Strategy:
    """One row of the table."""

    summary: str
    degrees: Callable[[int], Mapping[str, int]]
    """Number of devices to the mesh: size of each axis, outermost first."""
    batch: P
    """How the batch's leading dimensions (example, position) are split."""
    parameters: Sequence[tuple[str, P]]
    """Patterns of parameter paths and how the first that matches splits the leaf; others are replicated. The
    optimizer's copies of a parameter have its path in theirs, and so its split."""
    traffic: Callable[[Config, Mapping[str, int], str], list[Traffic]]
    """Predicted communication of one training step of (configuration, degrees, twin: `auto` or `explicit`)."""

    def batch_devices(self, degrees: Mapping[str, int]) -> int:
        """Pieces into which these degrees split the examples of a batch."""
        return math.prod(degrees[axis] for axis in split_axes(P(self.batch[0])))


def data_parallel_traffic(config: Config, degrees: Mapping[str, int], twin: str) -> list[Traffic]:
    """An all-reduce of every gradient, of the loss and of the number of counted tokens, in both twins."""
    gradients = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract_state(config).params))
    scalar = jnp.promote_types(config.model.dtype, jnp.float32).itemsize
    return [Traffic("all_reduce", ("data",), gradients + 2 * scalar)] if degrees["data"] > 1 else []


STRATEGIES: Mapping[str, Strategy] = {
    "data_parallel": Strategy(
        summary="every device has all parameters and its own rows of the batch",
        degrees=lambda devices: {"data": devices},
        batch=P("data"),
        parameters=(),
        traffic=data_parallel_traffic,
    ),
}


def find_strategy(name: str) -> Strategy:
    """The table's row of this name. Raises ValueError naming those there are."""
    check(name in STRATEGIES, f"no strategy is called {name!r}; choose one of: {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


def make_mesh(strategy: str, devices: Sequence[jax.Device] | int) -> Mesh:
    """The strategy's mesh over these devices, or over the first so many of `jax.devices()`.

    The axes are `Auto` ones, by name: `jax.make_mesh` alone would make `Explicit` ones. Under `jit` the compiler
    then decides about communication, and `shard_map` turns them into manual ones, where it decides nothing.
    Raises ValueError if there are fewer devices than asked for.
    """
    if isinstance(devices, int):
        there = jax.devices()
        check(devices >= 1, f"devices is {devices}; give at least 1")
        check(
            devices <= len(there),
            f"{devices} devices asked for, but there are {len(there)} ({there[0].platform}); "
            f"give --devices {len(there)} or fewer",
        )
        devices = there[:devices]
    degrees = find_strategy(strategy).degrees(len(devices))
    kinds = (AxisType.Auto,) * len(degrees)
    return jax.make_mesh(tuple(degrees.values()), tuple(degrees), kinds, devices=list(devices))


@dataclass(frozen=True)
class Layout:
    """A strategy on a mesh: the partition spec of every array, and the same as shardings."""

    mesh: Mesh
    state: Any
    """A TrainState of PartitionSpecs."""
    batch: Batch
    """A Batch of PartitionSpecs."""
    cache: Cache
    """A Cache of PartitionSpecs: its rows live where the batch's do."""
    batch_axes: tuple[str, ...]
    """Mesh axes over which the batch is split: sums over its tokens must be taken over these."""

    def shardings(self, specs: Any) -> Any:
        """The specs as NamedShardings on the mesh."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)

    def place(self, values: Any, specs: Any) -> Any:
        """The values, the same in every process, as arrays laid out by the specs, in memory that no other array uses.

        On CPU, JAX would use a numpy array's memory in place, whatever `may_alias` says; so that is copied first.
        """
        values = jax.tree.map(lambda leaf: np.array(leaf) if isinstance(leaf, np.ndarray) else leaf, values)
        if jax.process_count() > 1:
            return jax.tree.map(self.place_leaf, values, specs)
        return jax.device_put(values, self.shardings(specs), may_alias=False)

    def place_leaf(self, value: Any, spec: P) -> Any:
        """One value on the devices of all processes; each process puts what its own devices hold."""
        if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(self.place_leaf(jax.random.key_data(value), spec))
        value = np.asarray(value)
        return jax.make_array_from_callback(
            value.shape, NamedSharding(self.mesh, spec), lambda index: np.array(value[index])
        )

    def place_batch(self, batch: Batch, size: int) -> Batch:
        """A batch of this global size, of which this process has at least the rows `local_rows`, over the devices."""
        if jax.process_count() == 1:
            return self.place(batch, self.batch)
        first = int(batch.rows[0])

        def place_rows(leaf: np.ndarray, spec: P) -> jax.Array:
            def piece(index: Any) -> np.ndarray:
                start, stop, _ = index[0].indices(size)
                return np.array(leaf[(slice(start - first, stop - first), *index[1:])])

            shape = (size, *leaf.shape[1:])
            return jax.make_array_from_callback(shape, NamedSharding(self.mesh, spec), piece)

        return jax.tree.map(place_rows, batch, self.batch)

    def local_rows(self, size: int) -> slice:
        """The rows of a batch of this size that the devices of this process hold, and those between them if any."""
        sharding = NamedSharding(self.mesh, self.batch.rows)
        pieces = [
            index[0].indices(size) for index in sharding.addressable_devices_indices_map((size,)).values() if index
        ]
        return slice(min(start for start, _, _ in pieces), max(stop for _, stop, _ in pieces))

    def shapes(self, values: Any, specs: Any) -> Any:
        """The values' shapes and types with their shardings, to lower a function without arrays."""
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), values, self.shardings(specs)
        )


def layout(config: Config, mesh: Mesh) -> Layout:
    """Where the state and the batches of this configuration live on this mesh.

    Raises ValueError for a configuration that cannot work, or a batch that the axes it is split over do not divide.
    """
    validate(config)
    strategy = find_strategy(config.strategy)
    axes = split_axes(strategy.batch)
    rows = strategy.batch_devices(mesh.shape)
    check(
        config.batch % rows == 0,
        f"batch={config.batch} cannot be split evenly over {rows} devices; give a multiple of {rows}, "
        f"or a number of devices that divides {config.batch}",
    )

    def spec(path: Any, leaf: Any) -> P:
        return next((spec for pattern, spec in strategy.parameters if re.search(pattern, leaf_name(path))), P())

    return Layout(
        mesh=mesh,
        state=jax.tree_util.tree_map_with_path(spec, abstract_state(config)),
        batch=jax.tree.map(lambda leaf: P(*strategy.batch[: leaf.ndim]), abstract_batch(config)),
        cache=jax.tree.map(lambda leaf: P(None, *strategy.batch[:1]), abstract_cache(config)),
        batch_axes=axes,
    )


def split_axes(spec: P) -> tuple[str, ...]:
    """The mesh axes named by a spec, in order."""
    return tuple(axis for entry in spec if entry for axis in ([entry] if isinstance(entry, str) else entry))


def abstract_batch(config: Config) -> Batch:
    """Shapes and types of a global batch."""
    grid = (config.batch, config.model.window)
    return Batch(
        tokens=jax.ShapeDtypeStruct(grid, jnp.int32),
        targets=jax.ShapeDtypeStruct(grid, jnp.int32),
        weights=jax.ShapeDtypeStruct(grid, jnp.float32),
        rows=jax.ShapeDtypeStruct((config.batch,), jnp.uint32),
    )
