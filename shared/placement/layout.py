"""Where every array of a strategy lives.

Placement is shared knowledge: from the same rules the auto twin takes its `NamedSharding`s and the explicit twin its
`in_specs` and `out_specs`. Who communicates is what differs. The rules are those of the strategy table
(shared/placement/strategies.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shared.config import Config, check, validate
from shared.data.batches import Batch
from shared.model.decoding import Cache, abstract_cache
from shared.model.state import TrainState, abstract_state
from shared.placement.specs import fitting_spec, sharded_axes
from shared.placement.strategies import STRATEGIES, Strategy, check_sizes, find_strategy, read_mesh
from twinstep.tree import leaf_name

__all__ = ["STRATEGIES", "Layout", "abstract_batch", "constrained", "find_strategy", "layout", "make_mesh"]


def make_mesh(strategy: str, devices: Sequence[jax.Device] | int, degrees: str = "") -> Mesh:
    """The strategy's mesh over these devices, or over the first so many of `jax.devices()`.

    degrees: axes and degrees in place of the strategy's own, as in `data=2,tensor=4` (`Config.mesh`).

    The axes are `Auto` ones, by name: `jax.make_mesh` alone would make `Explicit` ones. Under `jit` the compiler
    then decides about communication, and `shard_map` turns them into manual ones, where it decides nothing.
    Raises ValueError if there are fewer devices than asked for, or degrees whose product is another number.
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
    row = find_strategy(strategy)
    sizes = read_mesh(degrees, len(devices)) if degrees else row.mesh_shape(len(devices))
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), kinds, devices=list(devices))


@dataclass(frozen=True)
class Layout:
    """A strategy on a mesh: the partition spec of every array, and the same as shardings."""

    mesh: Mesh
    strategy: Strategy
    state: TrainState
    """Of PartitionSpecs."""
    updated: Any
    """PartitionSpecs of the parameters while the optimizer updates them: those of its own copies."""
    batch: Batch
    """A Batch of PartitionSpecs."""
    cache: Cache
    """A Cache of PartitionSpecs: its rows live where the batch's do."""
    logits: P
    """Of (B, T, V), with an entry for each dimension; also of queries, keys and values, (B, T, H, K)."""
    stream: P
    """Of the residual stream, (B, T, D)."""
    batch_axes: tuple[str, ...]
    """Mesh axes over which the tokens that count are split: sums over them must be taken over these."""

    @cached_property
    def sequence_parallel(self) -> bool:
        """Whether the residual stream's sequence is split over `tensor` too."""
        return "tensor" in sharded_axes(self.stream)

    @cached_property
    def token_devices(self) -> int:
        """Devices over which the tokens that count are split."""
        return math.prod(self.mesh.shape[axis] for axis in self.batch_axes)

    @cached_property
    def reduce_axes(self) -> Any:
        """For each parameter the mesh axes that split the residual stream's tokens and not it: on each device along
        these its gradient is that of other tokens."""
        axes = [axis for axis in self.mesh.axis_names if axis in (*self.batch_axes, *sharded_axes(self.stream))]
        return jax.tree.map(
            lambda spec: tuple(axis for axis in axes if axis not in sharded_axes(spec)), self.state.params
        )

    @cached_property
    def outer(self) -> Any:
        """PartitionSpecs of the parameters, of which those of the blocks are passed over."""
        return jax.tree_util.tree_map_with_path(
            lambda path, spec: P() if leaf_name(path).startswith("blocks") else spec, self.state.params
        )

    @cached_property
    def block(self) -> Any:
        """PartitionSpecs of one block's parameters, without the leading dimension L."""
        return jax.tree.map(lambda spec: P(*spec[1:]), self.state.params["blocks"])

    def with_whole_sequences(self) -> "Layout":
        """As in generation, where a step has too few tokens to be split."""
        rows = self.batch.rows
        return replace(
            self,
            batch=replace(self.batch, tokens=rows, targets=rows, weights=rows),
            logits=P(self.logits[0], None, self.logits[2]),
            stream=rows,
            batch_axes=sharded_axes(rows),
        )

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

    Raises ValueError for a configuration that cannot work, or sizes that the axes they are split over do not divide.
    """
    validate(config)
    row, degrees = find_strategy(config.strategy), mesh.shape
    if config.mesh:
        asked = read_mesh(config.mesh, mesh.size)
        check(asked == degrees, f"mesh={config.mesh} is asked for, but the mesh made is {dict(degrees)}")
    check_sizes(config, row, degrees)

    def specs(tree: Any, optimizer: bool = False) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: fitting_spec(row.leaf_spec(leaf_name(path), optimizer), degrees), tree
        )

    state = abstract_state(config)
    tokens, seen = (fitting_spec(row.tokens(part), degrees) for part in (True, False))
    rows = fitting_spec(P(row.tokens()[0]), degrees)
    return Layout(
        mesh=mesh,
        strategy=row,
        state=replace(specs(state), optimizer=specs(state.optimizer, optimizer=True)),
        updated=specs(state.params, optimizer=True),
        batch=Batch(tokens=tokens, targets=seen, weights=seen, rows=rows),
        cache=jax.tree.map(
            lambda _: fitting_spec(P(None, *row.tokens()[:1], None, "tensor"), degrees), abstract_cache(config)
        ),
        logits=P(*(*fitting_spec(P(*row.tokens(), "tensor"), degrees), None, None, None)[:3]),
        stream=tokens,
        batch_axes=sharded_axes(seen),
    )


def constrained(mesh: Mesh, x: Any, spec: P) -> Any:
    """The array, with the request to the compiler that it live as the spec says."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def abstract_batch(config: Config) -> Batch:
    """Shapes and types of a global batch."""
    grid = (config.batch, config.model.seq_len)
    return Batch(
        tokens=jax.ShapeDtypeStruct(grid, jnp.int32),
        targets=jax.ShapeDtypeStruct(grid, jnp.int32),
        weights=jax.ShapeDtypeStruct(grid, jnp.float32),
        rows=jax.ShapeDtypeStruct((config.batch,), jnp.uint32),
    )
