"""The account of communication: what a step asks for, what the compiled program does, and what that sends.

Entries come from three places: the strategy table's formula (a `Traffic`), the traced function, in which the
author's own calls stand (traced.py), and the compiled program (compiled.py). Here they are put side
by side.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shared.placement.traffic import Traffic

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute", "collective_broadcast")
PRIMITIVES: Mapping[str, str] = {
    **dict.fromkeys(("psum", "psum_invariant", "pmax", "pmin"), "all_reduce"),
    **dict.fromkeys(("all_gather", "all_gather_invariant"), "all_gather"),
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ppermute": "collective_permute",
}
"""JAX's primitives for communication by name, to the kind of operation they become."""


@dataclass(frozen=True)
class Operand:
    """One array that a collective sends."""

    bytes: int
    """Bytes that each device puts in."""
    scope: str
    """Where in the model it comes from, `blocks.attention`, as far as the operation's name tells; or empty."""
    source: str
    """file:line that asked for it (see `Collective.source`)."""


@dataclass(frozen=True)
class Collective:
    """One collective operation, of a compiled program or as a function's author asked for it."""

    kind: str
    """One of KINDS."""
    axes: tuple[str, ...]
    """Mesh axes over which devices take part; empty if the groups are not those of any axes of the mesh."""
    participants: int
    """Devices in one group."""
    operands: tuple[Operand, ...]
    """XLA merges what can travel together."""
    count: int | None
    """Times it runs in one call of the program; None if a loop's length could not be read."""

    @property
    def arrays(self) -> int:
        return len(self.operands)

    @property
    def bytes(self) -> int:
        """Bytes that each device puts in, once."""
        return sum(operand.bytes for operand in self.operands)

    @property
    def source(self) -> str:
        """Who asked for it: file:line of the innermost frame outside installed packages, or the operation's name.

        Of a collective that was called by name, the line of the call; of one that the partitioner inserted, the lines
        of the operations whose results it sends, those of the most bytes first.
        """
        sizes: Counter[str] = Counter()
        for operand in self.operands:
            sizes[operand.source] += operand.bytes
        first, *others = [source for source, _ in sizes.most_common()]
        return first + (f" and {len(others)} other line{'s' * (len(others) > 1)}" if others else "")

    def __str__(self) -> str:
        times = "an unknown number of times" if self.count is None else f"{self.count} x"
        return (
            f"{times} {self.kind} over {', '.join(self.axes) or 'other groups'}, {self.participants} devices: "
            f"{self.arrays} array{'s' * (self.arrays > 1)}, {self.bytes:,} bytes, asked for by {self.source}"
        )

    @property
    def total_bytes(self) -> int:
        """Bytes over all runs in one call; a loop of unknown length is counted once."""
        return self.bytes * (self.count or 1)

    @property
    def total_sent(self) -> float:
        """Bytes that each device sends over all runs, if it is done along a ring."""
        return sent(self.kind, self.participants, self.total_bytes)


def sent(kind: str, devices: int, bytes: float) -> float:
    """Bytes that each of so many devices sends, if each puts in so many and they pass them on along a ring.

    These are the factors between "algorithm" and "bus" bandwidth of NVIDIA's nccl-tests (doc/PERFORMANCE.md): of the
    size S that it reports for a collective over n devices, each link carries 2(n-1)/n S for all_reduce, (n-1)/n S for
    all_gather, reduce_scatter and all_to_all, and S for sendrecv and broadcast. S is what a device puts in, but for
    all_gather what it gets out: n times as much.
    """
    factors = {
        "all_reduce": 2 * (devices - 1) / devices,
        "all_gather": devices - 1,
        "reduce_scatter": (devices - 1) / devices,
        "all_to_all": (devices - 1) / devices,
    }
    return factors.get(kind, 1) * bytes


def totals(entries: Iterable[Collective | Traffic]) -> dict[tuple[str, tuple[str, ...]], int]:
    """Bytes put in, by kind and axes."""
    found: dict[tuple[str, tuple[str, ...]], int] = {}
    for entry in entries:
        bytes = entry.total_bytes if isinstance(entry, Collective) else entry.bytes
        found[entry.kind, entry.axes] = found.get((entry.kind, entry.axes), 0) + bytes
    return {key: bytes for key, bytes in sorted(found.items()) if bytes}


@dataclass(frozen=True)
class Match:
    """What one twin sends for a purpose, and what the other sends in its place. Either side may be empty."""

    explicit: tuple[Collective, ...]
    auto: tuple[Collective, ...]

    @property
    def verdict(self) -> str:
        """`the same`, `otherwise` (another kind or size in its place), `surplus` (in auto) or `missing` (in auto)."""
        if not self.explicit:
            return "surplus"
        if not self.auto:
            return "missing"
        return "the same" if totals(self.explicit) == totals(self.auto) else "otherwise"


PURPOSES = {
    "add up": ("all_reduce", "reduce_scatter"),
    "bring": ("all_gather", "all_to_all", "collective_permute", "collective_broadcast"),
}
"""Kinds that can stand for one another: an all_reduce whose result is cut for a reduce_scatter, a gather for a ring."""


def matched(explicit: Sequence[Collective], auto: Sequence[Collective]) -> list[Match]:
    """For the explicit step's collectives, those that the partitioner inserted in their place, and the reverse.

    First by kind and axes, where the bytes over all of them are equal: the partitioner may send in many operations
    what was asked for in one. Then what is left, by purpose and axes. What has no counterpart then is missing in the
    auto step, or its surplus.
    """
    found = []
    ours, theirs = list(explicit), list(auto)
    for kind, axes in [key for key, bytes in totals(ours).items() if totals(theirs).get(key) == bytes]:
        sides = [tuple(c for c in side if (c.kind, c.axes) == (kind, axes)) for side in (ours, theirs)]
        found.append(Match(*sides))
        ours, theirs = ([c for c in side if (c.kind, c.axes) != (kind, axes)] for side in (ours, theirs))
    for axes in dict.fromkeys(c.axes for c in (*ours, *theirs)):
        for kinds in PURPOSES.values():
            sides = [tuple(c for c in side if c.axes == axes and c.kind in kinds) for side in (ours, theirs)]
            if any(sides):
                found.append(Match(*sides))
    return found
