"""Arrays laid out over the devices of a mesh, by one process or by each of several."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shared.config import check
from shared.data.batches import Batch
from shared.placement.layout import Layout


def place(layout: Layout, values: Any, specs: Any) -> Any:
    """The values, the same in every process, as arrays sharded by the specs, in memory that no other array uses.

    On CPU, JAX would use a numpy array's memory in place, whatever `may_alias` says; so that is copied first.
    """
    values = jax.tree.map(lambda leaf: np.array(leaf) if isinstance(leaf, np.ndarray) else leaf, values)
    if jax.process_count() > 1:
        return jax.tree.map(lambda value, spec: place_leaf(layout.mesh, value, spec), values, specs)
    return jax.device_put(values, layout.shardings(specs), may_alias=False)


def place_leaf(mesh: Mesh, value: Any, spec: P) -> Any:
    """One value on the devices of all processes; each process copies what its own devices hold."""
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        words = place_leaf(mesh, jax.random.key_data(value), spec)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(value))
    value = np.asarray(value)
    return jax.make_array_from_callback(value.shape, NamedSharding(mesh, spec), lambda index: np.array(value[index]))


def place_batch(layout: Layout, batch: Batch, size: int) -> Batch:
    """A batch of this global size over the devices; this process gives at least the rows `local_rows`.

    Raises ValueError for a batch that lacks some of them, or, in one process, that has another size.
    """
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(batch)}
    check(len(sizes) == 1, f"a batch's arrays have different numbers of rows ({sorted(sizes)}); give each the same")
    given = sizes.pop()
    if jax.process_count() == 1:
        check(given == size, f"the batch has {given} rows, but the configuration says batch={size}; give {size} rows")
        return place(layout, batch, layout.batch)
    first, needed = int(batch.rows[0]) if given else 0, local_rows(layout, size)
    check(
        first <= needed.start and needed.stop <= first + given,
        f"the batch has rows {first} to {first + given - 1}, but this process needs {needed.start} to "
        f"{needed.stop - 1} of batch={size}; give at least those",
    )

    def place_rows(leaf: np.ndarray, spec: P) -> jax.Array:
        def piece(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(size)
            return np.array(leaf[(slice(start - first, stop - first), *index[1:])])

        return jax.make_array_from_callback((size, *leaf.shape[1:]), NamedSharding(layout.mesh, spec), piece)

    return jax.tree.map(place_rows, batch, layout.batch)


def local_rows(layout: Layout, size: int) -> slice:
    """The rows of a batch of this size that the devices of this process hold, and those between them if any."""
    sharding = NamedSharding(layout.mesh, layout.batch.rows)
    found = [index[0].indices(size) for index in sharding.addressable_devices_indices_map((size,)).values() if index]
    return slice(min(start for start, _, _ in found), max(stop for _, stop, _ in found))
