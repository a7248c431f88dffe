"""What a training step is expected to send, from the configuration and the degrees of the mesh alone."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import jax.numpy as jnp

from shared.config import Config
from shared.model.state import abstract_state
from shared.placement.specs import fitting_spec, shard_count, sharded_axes
from shared.placement.strategies import Strategy, find_strategy
from twinstep.communication.account import Key, Total
from twinstep.tree import named_leaves


class Traffic(NamedTuple):
    """All collectives of one kind over the same mesh axes in one training step."""

    kind: str
    """As in `twinstep.communication`: all_reduce, all_gather, ..."""
    axes: tuple[str, ...]
    """In the mesh's order."""
    bytes: int
    """Input bytes of each device in one step, over all of these collectives."""


def traffic_totals(entries: Iterable[Traffic]) -> dict[Key, Total]:
    """The input bytes by kind and axes, as `twinstep.communication.account.totals` has those of collectives."""
    return {(kind, axes): Total(bytes, bytes) for kind, axes, bytes in sorted(entries) if bytes}


def predicted_traffic(config: Config, degrees: Mapping[str, int], twin: str) -> list[Traffic] | None:
    """Predicted communication of one training step of a twin (`auto` or `explicit`); None where no formula is known.

    The explicit twin's formulas follow its source. The auto twin matches them for pure data parallelism and Ulysses;
    pure tensor parallelism adds `unmerged_traffic`; elsewhere the partitioner's choices have no simple formula
    (docs/strategies.md lists them).
    """
    strategy = find_strategy(config.strategy)
    sharded = {axis for axis, size in degrees.items() if size > 1}
    only_rows = sharded <= {"data"} and not strategy.shard_optimizer
    one_batch = config.microbatches == 1  # else the auto twin reduces for each microbatch
    ulysses = sharded == {"context"} and strategy.attention == "ulysses" and one_batch
    tensor = sharded == {"tensor"} and not strategy.sequence_parallel and one_batch
    if twin == "auto" and not (only_rows or ulysses or tensor):
        return None
    parts = [*explicit_traffic(strategy, config, degrees)]
    if twin == "auto" and tensor:
        parts += unmerged_traffic(strategy, config, degrees)
    total: dict[tuple[str, tuple[str, ...]], int] = {}
    for kind, axes, size in parts:
        axes = tuple(axis for axis in degrees if axis in axes and degrees[axis] > 1)
        if axes and size:
            total[kind, axes] = total.get((kind, axes), 0) + size
    return [Traffic(kind, axes, size) for (kind, axes), size in total.items()]


def explicit_traffic(strategy: Strategy, config: Config, degrees: Mapping[str, int]) -> Iterator[Traffic]:
    """All of its parts, also those over axes of one device, which send nothing."""
    yield from parameters_traffic(strategy, config, degrees)
    yield from activations_traffic(strategy, config, degrees)


def parameters_traffic(strategy: Strategy, config: Config, degrees: Mapping[str, int]) -> Iterator[Traffic]:
    """Gathers of parameters, reductions of their gradients, of the loss and of counts, and the gradients' norm."""
    batch = sharded_axes(fitting_spec(strategy.tokens(), degrees))
    stream = sharded_axes(fitting_spec(strategy.tokens(residual=True), degrees))
    scalar = jnp.promote_types(config.model.dtype, jnp.float32).itemsize
    yield Traffic("all_reduce", batch, 2 * scalar)
    groups: set[frozenset[str]] = set()
    for name, leaf in named_leaves(abstract_state(config).params).items():
        spec, updated = (fitting_spec(strategy.leaf_spec(name, optimizer), degrees) for optimizer in (False, True))
        piece = leaf.size * leaf.dtype.itemsize // shard_count(spec, degrees)
        yield Traffic("all_reduce", tuple(axis for axis in stream if axis not in sharded_axes(spec)), piece)
        if spec != updated:
            yield Traffic("all_gather", ("data",), piece // degrees["data"])
        if "fsdp" in sharded_axes(spec):
            # Gathered again for the backward pass, which does not need a block's last bias.
            again = config.model.remat and name.startswith("blocks") and not name.endswith("contract.bias")
            yield Traffic("all_gather", ("fsdp",), piece * (1 + again) * config.microbatches)
            yield Traffic("reduce_scatter", ("fsdp",), piece * degrees["fsdp"] * config.microbatches)
        group = frozenset(sharded_axes(spec))
        if group not in groups:  # one sum of squares for all leaves that are sharded over the same axes
            groups.add(group)
            yield Traffic("all_reduce", tuple(group), leaf.dtype.itemsize)


def activations_traffic(strategy: Strategy, config: Config, degrees: Mapping[str, int]) -> Iterator[Traffic]:
    """Tensor and context parallelism: the forward pass, the backward pass, and what rematerialisation repeats."""
    model = config.model
    itemsize, scalar = (jnp.promote_types(model.dtype, least).itemsize for least in (model.dtype, jnp.float32))
    layers, again = model.layers, int(model.remat)
    tokens = config.batch * model.seq_len // shard_count(fitting_spec(strategy.tokens(), degrees), degrees)
    stream = tokens * model.d_model * itemsize
    tensor, context = degrees.get("tensor", 1), degrees.get("context", 1)
    # Forwards, a block has two column-parallel matmuls and reduces after two row-parallel ones; backwards the other way
    # round. The output is column-parallel too. Rematerialisation stops before a block's last reduction.
    enters, reductions = 2 * layers + 1, 2 * layers
    if strategy.sequence_parallel:
        yield Traffic("all_gather", ("tensor",), stream // tensor * (enters + reductions + again * 2 * layers))
        yield Traffic("reduce_scatter", ("tensor",), stream * (enters + reductions + again * layers))
    else:
        yield Traffic("all_reduce", ("tensor",), stream * (enters + reductions + again * layers))
    yield Traffic("all_reduce", ("tensor",), 3 * tokens * scalar)  # cross-entropy
    heads = stream // tensor
    if strategy.attention == "ulysses":
        yield Traffic("all_to_all", ("context",), 4 * heads * layers * (2 + again))
    else:
        yield Traffic("collective_permute", ("context",), 2 * heads * (context - 1) * layers * (2 + again))


def unmerged_traffic(strategy: Strategy, config: Config, degrees: Mapping[str, int]) -> Iterator[Traffic]:
    """Extra traffic of the auto twin under pure tensor parallelism.

    The input gradients of query, key and value are reduced one by one, and so are the leaves' squares for the norm.
    """
    stream = config.batch * config.model.seq_len * config.model.d_model * jnp.dtype(config.model.dtype).itemsize
    yield Traffic("all_reduce", ("tensor",), 2 * config.model.layers * stream)
    leaves = named_leaves(abstract_state(config).params)
    split = [leaf.dtype.itemsize for name, leaf in leaves.items() if "tensor" in sharded_axes(strategy.leaf_spec(name))]
    yield Traffic("all_reduce", ("tensor",), sum(split[1:]))
