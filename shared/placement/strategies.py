"""The strategy table: mesh axes, their degrees, and what is sharded over each.

One set of rules gives every sharding, over axes that a mesh may have: `data` (rows of the batch), `fsdp` (rows of the
batch, and the parameters), `context` (the sequence) and `tensor` (heads, d_ff and vocabulary). An axis that a mesh does
not have shards nothing, so every hybrid follows from the same rules. Tests, benchmarks, command line and docs read this
table.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from jax.sharding import PartitionSpec as P

from shared.config import Config, check
from shared.placement.specs import sharded_axes

AXES = {
    "data": "rows of the batch",
    "fsdp": "rows of the batch, and the parameters",
    "context": "the sequence",
    "tensor": "heads, d_ff and vocabulary",
}
"""All mesh axes with what they shard, outermost first: devices along the last communicate most, and are nearest."""

PARAMETERS = (
    (r"attention\.(query|key|value)\.kernel$", P(None, "fsdp", "tensor")),  # (L, D, H, K)
    (r"attention\.(query|key|value)\.bias$", P(None, "tensor")),  # (L, H, K)
    (r"attention\.out\.kernel$", P(None, "tensor", None, "fsdp")),  # (L, H, K, D)
    (r"expand\.kernel$", P(None, "fsdp", "tensor")),  # (L, D, F)
    (r"expand\.bias$", P(None, "tensor")),  # (L, F)
    (r"contract\.kernel$", P(None, "tensor", "fsdp")),  # (L, F, D)
    (r"blocks\..*\.(scale|bias)$", P(None, "fsdp")),  # (L, D)
    (r"embedding\.embedding$", P(None, "fsdp")),  # (V, D), (T, D)
    (r"norm\.(scale|bias)$", P("fsdp")),  # (D,)
    (r"output\.kernel$", P("fsdp", "tensor")),  # (D, V)
)
"""Patterns of parameter paths, with the PartitionSpec of the first that matches; other leaves are replicated.

The optimizer's copies of a parameter have its path in theirs, and so its spec. (Not Flax's `nnx.with_partitioning`:
traffic formulas and docs need the rules as data, without a model.)"""


@dataclass(frozen=True)
class Strategy:
    """One row of the table."""

    summary: str
    mesh_shape: Callable[[int], Mapping[str, int]]
    """Number of devices to the mesh: size of each axis, outermost first."""
    attention: Literal["ring", "ulysses"] = "ring"
    """How attention sees the whole sequence where `context` shards it."""
    sequence_parallel: bool = False
    """Whether `tensor` also shards the sequence of the residual stream, norms and dropout (Korthikanti et al. 2022)."""
    shard_optimizer: bool = False
    """Whether `data` shards the optimizer state (Rajbhandari et al. 2020, stage 1)."""

    def tokens(self, residual: bool = False) -> P:
        """Spec of (example, position); residual: of the residual stream."""
        return P(("data", "fsdp"), ("context", "tensor") if residual and self.sequence_parallel else "context")

    def batch_devices(self, degrees: Mapping[str, int]) -> int:
        """Number of shards of a batch's rows for these degrees."""
        return math.prod(degrees.get(axis, 1) for axis in sharded_axes(P(self.tokens()[0])))

    def leaf_spec(self, name: str, optimizer: bool = False) -> P:
        """Spec of the parameter with this path, or of the optimizer's copy of it."""
        spec = next((spec for pattern, spec in PARAMETERS if re.search(pattern, name)), P())
        if optimizer and self.shard_optimizer:
            return P(*(("fsdp", "data") if entry == "fsdp" else entry for entry in spec))
        return spec

    def divisibility(self) -> Mapping[str, tuple[str, ...]]:
        """Sizes of the model, each with the axes that must divide it."""
        return {
            "heads": ("context", "tensor") if self.attention == "ulysses" else ("tensor",),
            "d_ff": ("tensor",),
            "vocabulary": ("tensor",),
            "seq_len": ("context", "tensor") if self.sequence_parallel else ("context",),
            "d_model": ("fsdp", "data") if self.shard_optimizer else ("fsdp",),
        }


def two_groups(devices: int) -> Mapping[str, int]:
    """`data` across two groups, where there are enough devices, and `fsdp` inside."""
    groups = 2 if devices % 2 == 0 and devices > 2 else 1
    return {"data": groups, "fsdp": devices // groups}


def three_axes(devices: int) -> Mapping[str, int]:
    """Twos, as many as there are: first fsdp, then tensor, and context last."""
    fsdp = 2 if devices % 2 == 0 else devices
    tensor = 2 if devices % 4 == 0 else 1
    return {"fsdp": fsdp, "context": devices // (fsdp * tensor), "tensor": tensor}


STRATEGIES: Mapping[str, Strategy] = {
    "data_parallel": Strategy(
        summary="every device has all parameters and its own rows of the batch",
        mesh_shape=lambda devices: {"data": devices},
    ),
    "zero_1": Strategy(
        summary="as data_parallel, with the optimizer state sharded",
        mesh_shape=lambda devices: {"data": devices},
        shard_optimizer=True,
    ),
    "fsdp": Strategy(
        summary="parameters and optimizer state sharded, every device has its own rows of the batch",
        mesh_shape=lambda devices: {"fsdp": devices},
    ),
    "hsdp": Strategy(
        summary="fsdp inside each of two groups of devices, data_parallel between them",
        mesh_shape=two_groups,
    ),
    "tensor_parallel": Strategy(
        summary="every device has its own heads, units of d_ff and entries of the vocabulary, and the whole batch",
        mesh_shape=lambda devices: {"tensor": devices},
    ),
    "sequence_parallel": Strategy(
        summary="as tensor_parallel, with the sequence sharded between the matmuls",
        mesh_shape=lambda devices: {"tensor": devices},
        sequence_parallel=True,
    ),
    "context_parallel": Strategy(
        summary="every device has all parameters and its own part of each sequence; keys and values go round in a ring",
        mesh_shape=lambda devices: {"context": devices},
    ),
    "ulysses": Strategy(
        summary="as context_parallel, but attention has whole sequences of a device's own heads",
        mesh_shape=lambda devices: {"context": devices},
        attention="ulysses",
    ),
    "fsdp_context_tensor": Strategy(
        summary="fsdp, context and tensor parallelism at once",
        mesh_shape=three_axes,
    ),
}


ALIASES = {"mixture": "fsdp_context_tensor", "context_all_to_all": "ulysses"}
"""Former names, which saved commands and checkpoints may have."""


def find_strategy(name: str) -> Strategy:
    """The table's row of this name, or former name. Raises ValueError naming those there are."""
    name = ALIASES.get(name, name)
    check(name in STRATEGIES, f"no strategy is called {name!r}; choose one of: {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


def degrees_of(config: Config, devices: int) -> Mapping[str, int]:
    """The mesh of a run on so many devices: the one that it asks for, or its strategy's own."""
    return read_mesh(config.mesh, devices) if config.mesh else find_strategy(config.strategy).mesh_shape(devices)


def label(config: Config) -> str:
    """What to call the strategy of a run, whose mesh may differ from the strategy's own: then by its axes."""
    name = ALIASES.get(config.strategy, config.strategy)
    if not config.mesh:
        return name
    axes = " x ".join(read_degrees(config.mesh))
    return axes if name == "data_parallel" else f"{name} over {axes}"


def summary(config: Config) -> str:
    """The summary of the strategy, or what each axis shards of the mesh that is given in its place."""
    if not config.mesh:
        return find_strategy(config.strategy).summary
    return ", ".join(f"{axis} shards {AXES[axis]}" for axis in read_degrees(config.mesh))


def read_degrees(text: str) -> dict[str, int]:
    """Axes and degrees from a text such as `data=2,tensor=4`, in the order of AXES. Raises ValueError for others."""
    found = {}
    for part in text.split(","):
        axis, _, degree = (piece.strip() for piece in part.partition("="))
        check(axis in AXES, f"mesh={text} has an axis {axis!r}; give axes of {', '.join(AXES)}, as in data=2,tensor=4")
        check(axis not in found, f"mesh={text} has {axis} twice; give each axis once")
        check(
            degree.isdecimal() and int(degree) >= 1,
            f"mesh={text} gives {axis} the degree {degree!r}; give a number of devices, as in data=2,tensor=4",
        )
        found[axis] = int(degree)
    return {axis: found[axis] for axis in AXES if axis in found}


def read_mesh(text: str, devices: int) -> dict[str, int]:
    """The same, for so many devices. Raises ValueError as well for degrees with another product."""
    found = read_degrees(text)
    product = math.prod(found.values())
    check(
        product == devices,
        f"mesh={text} is for {product} devices, but there are {devices}; give degrees whose product is {devices}, "
        f"or --devices {product}",
    )
    return found


def check_sizes(config: Config, row: Strategy, degrees: Mapping[str, int]) -> None:
    """Raise ValueError for the first size that its mesh axes do not divide, with the remedy."""
    model, rows = config.model, row.batch_devices(degrees)
    check(
        config.batch % rows == 0,
        f"batch={config.batch} cannot be split evenly over {rows} devices; give a multiple of {rows}, "
        f"or a number of devices that divides {config.batch}",
    )
    check(
        config.batch % (rows * config.microbatches) == 0,
        f"batch={config.batch} cannot be split into {config.microbatches} microbatches on each of {rows} devices; "
        f"give a multiple of {rows * config.microbatches}, or other --microbatches",
    )
    for name, axes in row.divisibility().items():
        pieces = math.prod(degrees.get(axis, 1) for axis in axes)
        size = getattr(model, name)
        over = " x ".join(axis for axis in axes if degrees.get(axis, 1) > 1)
        check(
            size % pieces == 0,
            f"{name}={size} cannot be split evenly over the {pieces} devices of {over}; "
            f"give a multiple of {pieces}, or a degree of {over} that divides {size}",
        )
