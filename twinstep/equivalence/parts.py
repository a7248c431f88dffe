"""Steps that do something wrong with the parts of a batch that devices have: what the reference makes of the parts."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from twinstep.equivalence.hints import Suspect
from twinstep.equivalence.leaves import Named, is_number, plain


def split_suspects(reference: Callable[[Any], Named], batch: Any, axes: Mapping[str, int]) -> Iterator[Suspect]:
    """What anybody's step may do wrong with a batch that is split over one mesh axis or several.

    reference: what the step gives of such a batch, leaves by name.
    """
    sizes = {name: size for name, size in axes.items() if size > 1}
    for number in range(1, len(sizes) + 1):
        for chosen in itertools.combinations(sizes, number):
            n = math.prod(sizes[name] for name in chosen)
            shards = cut_batch(batch, n)
            if not shards:
                continue
            own = [reference(shard) for shard in shards]
            over = f"{n} devices along {' x '.join(chosen)}"
            yield Suspect(
                f"averaging what each of the {over} has for its own rows: where they count different numbers of "
                "tokens, the mean of means is not the mean (reduce sums and counts, then divide)",
                lambda own=own: mean(own),
            )
            yield Suspect(f"giving all of the {over} the same rows", lambda own=own: own[0])
            yield Suspect(
                f"reducing nothing: each of the {over} keeps what its own rows give",
                lambda own=own: own[0],
                copies=True,
            )


def cut_batch(batch: Any, pieces: int) -> list[Any]:
    """The batch cut into so many along the leading dimension of its arrays; empty if that does not divide."""
    leaves = [leaf for leaf in jax.tree.leaves(batch) if np.ndim(leaf)]
    if not leaves or any(np.shape(leaf)[0] % pieces for leaf in leaves):
        return []

    def cut(leaf: Any, number: int) -> Any:
        size = np.shape(leaf)[0] // pieces if np.ndim(leaf) else 0
        return leaf[number * size : (number + 1) * size] if size else leaf

    return [jax.tree.map(lambda leaf, number=number: cut(leaf, number), batch) for number in range(pieces)]


def mean(results: Sequence[Named]) -> Named:
    """The mean of each floating leaf; of the others, of which a mean means nothing, what the first has."""
    means = Named(results[0])
    for name, leaf in results[0].items():
        if is_number(leaf) and not isinstance(leaf, (bool, int)):
            values = [plain(result[name]) for result in results]
            if jnp.issubdtype(values[0].dtype, jnp.floating) and len({value.shape for value in values}) == 1:
                means[name] = np.mean(np.stack(values), axis=0).astype(values[0].dtype)
    return means


def mesh_axes(leaves: Mapping[str, Any]) -> dict[str, int]:
    """The mesh axes over which the leaves live, and their sizes; one unnamed axis for devices without a mesh."""
    devices: set[jax.Device] = set()
    for leaf in leaves.values():
        if isinstance(leaf, jax.Array):
            if isinstance(leaf.sharding, NamedSharding):
                return dict(leaf.sharding.mesh.shape)
            devices |= leaf.sharding.device_set
    return {"devices": len(devices)} if len(devices) > 1 else {}
