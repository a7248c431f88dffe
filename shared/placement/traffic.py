"""What a training step is expected to send, from the configuration and the degrees of the mesh alone."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax.numpy as jnp

from shared.config import Config
from shared.model.state import abstract_state
from shared.placement.specs import fitting_spec, shard_count, sharded_axes
from shared.placement.strategies import Strategy, find_strategy
from twinstep.tree import named_leaves


class Traffic(NamedTuple):
    """All collectives of one kind over the same mesh axes in one training step."""

    kind: str
    """As in twinstep/communication/compiled.py."""
    axes: tuple[str, ...]
    """In the mesh's order."""
    bytes: int
    """Bytes that each device puts in, over all of them."""


def predicted_traffic(config: Config, degrees: Mapping[str, int], twin: str) -> list[Traffic] | None:
    """What each device puts into the collectives of one training step; None where no formula is known.

    The explicit twin sends what is written there, and the formulas follow the source. In the auto twin the partitioner
    decides. It does the same where only rows of the batch are split, or sequences with attention over heads, and with
    `tensor` alone little else; elsewhere its choices have no simple formula (docs/strategies.md says what they are).
    """
    row = find_strategy(config.strategy)
    split = {axis for axis, size in degrees.items() if size > 1}
    rows = split <= {"data"} and not row.shard_optimizer
    whole = config.microbatches == 1  # elsewhere the auto twin reduces in every turn of their loop
    exchanged = split == {"context"} and row.attention == "ulysses" and whole
    tensor = split == {"tensor"} and not row.sequence_parallel and whole
    if twin == "auto" and not (rows or exchanged or tensor):
        return None
    parts = [*explicit_traffic(row, config, degrees)]
    if twin == "auto" and tensor:
        parts += unmerged_traffic(row, config, degrees)
    total: dict[tuple[str, tuple[str, ...]], int] = {}
    for kind, axes, size in parts:
        axes = tuple(axis for axis in degrees if axis in axes and degrees[axis] > 1)
        if axes and size:
            total[kind, axes] = total.get((kind, axes), 0) + size
    return [Traffic(kind, axes, size) for (kind, axes), size in total.items()]


def explicit_traffic(row: Strategy, config: Config, degrees: Mapping[str, int]) -> Iterator[Traffic]:
    """All parts of it, also over axes of one device, in which nothing is sent."""
    yield from parameters_traffic(row, config, degrees)
    yield from activations_traffic(row, config, degrees)


def parameters_traffic(row: Strategy, config: Config, degrees: Mapping[str, int]) -> Iterator[Traffic]:
    """Gathers of parameters, reductions of their gradients, of the loss and of counts, and the gradients' norm."""
    batch = sharded_axes(fitting_spec(row.tokens(), degrees))
    stream = sharded_axes(fitting_spec(row.tokens(residual=True), degrees))
    scalar = jnp.promote_types(config.model.dtype, jnp.float32).itemsize
    yield Traffic("all_reduce", batch, 2 * scalar)
    sorts: set[frozenset[str]] = set()
    for name, leaf in named_leaves(abstract_state(config).params).items():
        spec, updated = (fitting_spec(row.leaf_spec(name, optimizer), degrees) for optimizer in (False, True))
        piece = leaf.size * leaf.dtype.itemsize // shard_count(spec, degrees)
        yield Traffic("all_reduce", tuple(axis for axis in stream if axis not in sharded_axes(spec)), piece)
        if spec != updated:
            yield Traffic("all_gather", ("data",), piece // degrees["data"])
        if "fsdp" in sharded_axes(spec):
            # Gathered again to go back; but nothing in the backward pass of a block needs its last bias.
            again = config.model.remat and name.startswith("blocks") and not name.endswith("contract.bias")
            yield Traffic("all_gather", ("fsdp",), piece * (1 + again) * config.microbatches)
            yield Traffic("reduce_scatter", ("fsdp",), piece * degrees["fsdp"] * config.microbatches)
        sort = frozenset(sharded_axes(spec))
        if sort not in sorts:  # the sum of squares of all leaves of a sort
            sorts.add(sort)
            yield Traffic("all_reduce", tuple(sort), leaf.dtype.itemsize)


def activations_traffic(row: Strategy, config: Config, degrees: Mapping[str, int]) -> Iterator[Traffic]:
    """What tensor and context parallelism send in a pass forwards, one backwards, and what is computed again for it."""
    model = config.model
    itemsize, scalar = (jnp.promote_types(model.dtype, least).itemsize for least in (model.dtype, jnp.float32))
    layers, again = model.layers, int(model.remat)
    tokens = config.batch * model.seq_len // shard_count(fitting_spec(row.tokens(), degrees), degrees)
    stream = tokens * model.d_model * itemsize
    tensor, context = degrees.get("tensor", 1), degrees.get("context", 1)
    # Forwards a block enters two products and reduces two; backwards the other way round. The output is entered too.
    # What is computed again stops before a block's last reduction.
    enters, reductions = 2 * layers + 1, 2 * layers
    if row.sequence_parallel:
        yield Traffic("all_gather", ("tensor",), stream // tensor * (enters + reductions + again * 2 * layers))
        yield Traffic("reduce_scatter", ("tensor",), stream * (enters + reductions + again * layers))
    else:
        yield Traffic("all_reduce", ("tensor",), stream * (enters + reductions + again * layers))
    yield Traffic("all_reduce", ("tensor",), 3 * tokens * scalar)  # cross-entropy
    heads = stream // tensor
    if row.attention == "ulysses":
        yield Traffic("all_to_all", ("context",), 4 * heads * layers * (2 + again))
    else:
        yield Traffic("collective_permute", ("context",), 2 * heads * (context - 1) * layers * (2 + again))


def unmerged_traffic(row: Strategy, config: Config, degrees: Mapping[str, int]) -> Iterator[Traffic]:
    """What the auto twin sends more where only `tensor` splits: the gradients of what query, key and value read are
    reduced one by one, and so are the squares of the leaves for the norm."""
    stream = config.batch * config.model.seq_len * config.model.d_model * jnp.dtype(config.model.dtype).itemsize
    yield Traffic("all_reduce", ("tensor",), 2 * config.model.layers * stream)
    leaves = named_leaves(abstract_state(config).params)
    split = [leaf.dtype.itemsize for name, leaf in leaves.items() if "tensor" in sharded_axes(row.leaf_spec(name))]
    yield Traffic("all_reduce", ("tensor",), sum(split[1:]))
