"""Where every array of a strategy lives.

Placement is shared knowledge: from the same rules the auto twin takes its `NamedSharding`s and the explicit twin its
`in_specs` and `out_specs`. Who communicates is what differs. The rules are those of the strategy table
(shared/placement/strategies.py).
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shared.config import Config, check, validate
from shared.data.batches import Batch
from shared.model.decoding import Cache, abstract_cache
from shared.model.state import TrainState, abstract_state
from shared.placement.specs import fitting_spec, sharded_axes
from shared.placement.strategies import Strategy, check_sizes, find_strategy, read_mesh
from twinstep.tree import leaf_name


@dataclass(frozen=True)
class Layout:
    """A strategy on a mesh: the partition spec of every array, and the same as shardings."""

    mesh: Mesh
    strategy: Strategy
    state: TrainState
    """Of PartitionSpecs."""
    updated: Any
    """PartitionSpecs of the parameters while the optimizer updates them: those of the optimizer state."""
    batch: Batch
    """A Batch of PartitionSpecs."""
    cache: Cache
    """A Cache of PartitionSpecs: its rows live where the batch's do."""
    logits: P
    """Of (B, T, V), with an entry for each dimension."""
    attention: P
    """Of queries, keys and values, (B, T, H, K), with an entry for each of the first three dimensions."""
    residual: P
    """Of the residual stream, (B, T, D)."""
    batch_axes: tuple[str, ...]
    """Mesh axes over which the tokens that count are sharded: sums over tokens are reduced over these."""

    @cached_property
    def sequence_parallel(self) -> bool:
        """Whether the residual stream's sequence is sharded over `tensor` too."""
        return "tensor" in sharded_axes(self.residual)

    @cached_property
    def reduce_axes(self) -> Any:
        """For each parameter, the axes over which tokens are sharded and the parameter is replicated.

        Devices along them hold gradients of different tokens, which must be summed.
        """
        axes = [axis for axis in self.mesh.axis_names if axis in (*self.batch_axes, *sharded_axes(self.residual))]
        return jax.tree.map(
            lambda spec: tuple(axis for axis in axes if axis not in sharded_axes(spec)), self.state.params
        )

    @cached_property
    def outer(self) -> Any:
        """PartitionSpecs of the parameters outside the blocks; P() for those of the blocks."""
        return jax.tree_util.tree_map_with_path(
            lambda path, spec: P() if leaf_name(path).startswith("blocks") else spec, self.state.params
        )

    @cached_property
    def block(self) -> Any:
        """PartitionSpecs of one block's parameters, without the leading dimension L."""
        return jax.tree.map(lambda spec: P(*spec[1:]), self.state.params["blocks"])

    def with_unsharded_sequences(self) -> "Layout":
        """The layout of generation, where a step has too few tokens to shard them."""
        rows = self.batch.rows
        return replace(
            self,
            batch=replace(self.batch, tokens=rows, targets=rows, weights=rows),
            logits=P(self.logits[0], None, self.logits[2]),
            attention=P(self.attention[0], None, self.attention[2]),
            residual=rows,
            batch_axes=sharded_axes(rows),
        )

    def shardings(self, specs: Any) -> Any:
        """The specs as NamedShardings on the mesh."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)

    def shapes(self, values: Any, specs: Any) -> Any:
        """The values' shapes and types with their shardings, to lower a function without arrays."""
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), values, self.shardings(specs)
        )


def layout(config: Config, mesh: Mesh) -> Layout:
    """Every sharding of this configuration on this mesh.

    Raises ValueError for a configuration that cannot work, or sizes that the axes they are sharded over do not divide.
    """
    validate(config)
    strategy, degrees = find_strategy(config.strategy), mesh.shape
    if config.mesh:
        asked = read_mesh(config.mesh, mesh.size)
        check(asked == degrees, f"mesh={config.mesh} is configured, but the mesh is {dict(degrees)}")
    check_sizes(config, strategy, degrees)

    def specs(tree: Any, optimizer: bool = False) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: fitting_spec(strategy.leaf_spec(leaf_name(path), optimizer), degrees), tree
        )

    state = abstract_state(config)
    residual, tokens = (fitting_spec(strategy.tokens(residual), degrees) for residual in (True, False))
    rows = fitting_spec(P(strategy.tokens()[0]), degrees)
    with_tensor = P(*(*fitting_spec(P(*strategy.tokens(), "tensor"), degrees), None, None, None)[:3])
    return Layout(
        mesh=mesh,
        strategy=strategy,
        state=replace(specs(state), optimizer=specs(state.optimizer, optimizer=True)),
        updated=specs(state.params, optimizer=True),
        batch=Batch(tokens=residual, targets=tokens, weights=tokens, rows=rows),
        cache=jax.tree.map(
            lambda _: fitting_spec(P(None, *strategy.tokens()[:1], None, "tensor"), degrees), abstract_cache(config)
        ),
        logits=with_tensor,
        attention=with_tensor,
        residual=residual,
        batch_axes=sharded_axes(tokens),
    )


def constrained(mesh: Mesh, x: Any, spec: P) -> Any:
    """The array, constrained to this sharding: a request to the compiler."""
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
