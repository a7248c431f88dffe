"""The terms in which communication is told, by every reader: a `Collective`, its operands, and where it stands."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "ragged_all_to_all",
    "collective_permute",
    "collective_broadcast",
    "send",
)
"""Kinds that are understood. A reader that meets another operation between devices lists it under its own name."""
PRIMITIVES: Mapping[str, str] = {
    **dict.fromkeys(("psum", "psum_invariant", "unreduced_psum", "pmax", "pmin"), "all_reduce"),
    **dict.fromkeys(("unreduced_pmax", "unreduced_pmin"), "all_reduce"),
    **dict.fromkeys(("all_gather", "all_gather_invariant", "all_gather_reduced"), "all_gather"),
    **dict.fromkeys(("reduce_scatter", "unreduced_reduce_scatter"), "reduce_scatter"),
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "ragged_all_to_all",
    "ppermute": "collective_permute",
    "pbroadcast": "collective_broadcast",
    "psend": "send",
}
"""JAX's primitives for communication by name, to the kind of operation they become."""


@dataclass(frozen=True)
class Operand:
    """One array that enters a collective."""

    bytes: int
    """Input bytes on each device."""
    dtype: str
    """Type of its elements, `float32`. It is the type on the wire: compilers may reduce in a wider one than was
    written."""
    scope: str
    """The `jax.named_scope`s it comes from, joined by dots, `blocks.attention`; empty if there are none."""
    source: str
    """file:line (see `Collective.source`)."""


@dataclass(frozen=True)
class Branch:
    """One branch of a conditional (`lax.cond`, `lax.switch`), of which a run takes one."""

    conditional: int
    """Number of the conditional, to tell it from others of the same program."""
    index: int
    """Which branch, from 0: `lax.cond` has that of False first."""
    branches: int
    """How many there are."""


@dataclass(frozen=True)
class Collective:
    """One operation between devices, of a compiled program or as written in a function's source."""

    kind: str
    """One of KINDS, or the name of an operation that is not known."""
    axes: tuple[str, ...]
    """Mesh axes over which devices take part; empty if the groups are not those of any axes of the mesh."""
    participants: int
    """Devices in one group."""
    operands: tuple[Operand, ...]
    """XLA merges what can travel together."""
    count: int | None
    """Runs in one call of the program, if every branch around it is taken; None if a loop's length is unknown."""
    branch: tuple[Branch, ...] = ()
    """The branches it stands in, the outermost first; empty if it always runs."""

    @property
    def arrays(self) -> int:
        return len(self.operands)

    @property
    def bytes(self) -> int:
        """Input bytes of each device in one run."""
        return sum(operand.bytes for operand in self.operands)

    @property
    def source(self) -> str:
        """file:line of the innermost frame outside installed packages, or the operation's name where none is known.

        Of a collective that is written in the source, the line of the call; of one that the partitioner inserted, the
        lines of the operations whose results it sends, those of the most bytes first.
        """
        sizes: Counter[str] = Counter()
        for operand in self.operands:
            sizes[operand.source] += operand.bytes
        first, *others = [source for source, _ in sizes.most_common()] or ["unknown"]
        return first + (f" and {len(others)} other line{'s' * (len(others) > 1)}" if others else "")

    @property
    def total_bytes(self) -> int | None:
        """Input bytes of each device over all runs; None if a loop's length is unknown."""
        return None if self.count is None else self.bytes * self.count

    def __str__(self) -> str:
        times = "an unknown number of times" if self.count is None else f"{self.count} x"
        types = "/".join(dict.fromkeys(operand.dtype for operand in self.operands))
        arrays = f"{self.arrays} array{'s' * (self.arrays != 1)}, {self.bytes:,} bytes of {types}"
        inside = "".join(f", in branch {b.index} of {b.branches} of conditional {b.conditional}" for b in self.branch)
        return (
            f"{times} {self.kind} over {', '.join(self.axes) or 'other groups'}, {self.participants} devices: "
            f"{arrays}, source {self.source}{inside}"
        )
