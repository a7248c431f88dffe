"""The account of communication: totals, bytes on the wire, and what one step has in the place of what another has."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from twinstep.communication.entries import Collective

Key = tuple[str, tuple[str, ...]]
"""Kind and axes."""


@dataclass(frozen=True)
class Total:
    """A sum over collectives, of which those in branches may run or not."""

    least: float
    """If each conditional takes its cheapest branch, and loops of unknown length never run."""
    most: float | None
    """If each conditional takes its dearest branch; None if a loop's length is unknown: then only `least` is
    certain."""

    @property
    def exact(self) -> bool:
        return self.least == self.most

    def __str__(self) -> str:
        if self.most is None:
            return f"at least {self.least:,.0f} (and loops of unknown length)"
        return f"{self.least:,.0f}" if self.exact else f"{self.least:,.0f} to {self.most:,.0f}"


def bounds(entries: Iterable[Collective], weight: Callable[[Collective], float], depth: int = 0) -> Total:
    """The sum over entries of how often each runs times its weight; depth: branches that all of them stand in."""
    least: float = 0
    most: float = 0
    known = True
    conditionals: dict[int, dict[int, list[Collective]]] = {}
    sizes: dict[int, int] = {}
    for entry in entries:
        if len(entry.branch) > depth:
            branch = entry.branch[depth]
            conditionals.setdefault(branch.conditional, {}).setdefault(branch.index, []).append(entry)
            sizes[branch.conditional] = branch.branches
        elif entry.count is None:
            known = False
        else:
            least, most = least + entry.count * weight(entry), most + entry.count * weight(entry)
    for number, branches in conditionals.items():
        found = [bounds(inside, weight, depth + 1) for inside in branches.values()]
        found += [Total(0, 0)] * (len(found) < sizes[number])  # a branch that sends nothing
        least += min(total.least for total in found)
        known = known and all(total.most is not None for total in found)
        most += max(total.most or 0 for total in found)
    return Total(least, most if known else None)


def total_bytes(entries: Iterable[Collective]) -> Total:
    """Input bytes of each device, over all collectives."""
    return bounds(entries, lambda entry: entry.bytes)


def total_runs(entries: Iterable[Collective]) -> Total:
    """How many collectives run."""
    return bounds(entries, lambda entry: 1)


def by_key(entries: Iterable[Collective]) -> dict[Key, list[Collective]]:
    """The entries by kind and axes, sorted."""
    found: dict[Key, list[Collective]] = {}
    for entry in entries:
        found.setdefault((entry.kind, entry.axes), []).append(entry)
    return dict(sorted(found.items()))


def totals(entries: Iterable[Collective]) -> dict[Key, Total]:
    """Input bytes of each device, by kind and axes."""
    found = {key: total_bytes(group) for key, group in by_key(entries).items()}
    return {key: total for key, total in found.items() if total != Total(0, 0)}


def bytes_on_wire(kind: str, devices: int, bytes: float) -> float:
    """Bytes that each of so many devices sends over its link in a collective along a ring, from its input bytes.

    These are the factors between "algorithm" and "bus" bandwidth of NVIDIA's nccl-tests (doc/PERFORMANCE.md): of the
    size S that it reports for a collective over n devices, each link carries 2(n-1)/n S for all_reduce, (n-1)/n S for
    all_gather, reduce_scatter and all_to_all, and S for sendrecv and broadcast. S is the input of a device, but for
    all_gather its output: n times as much. Raises ValueError for a kind that is not known.
    """
    factors = {
        "all_reduce": 2 * (devices - 1) / devices,
        "all_gather": devices - 1,
        "reduce_scatter": (devices - 1) / devices,
        "all_to_all": (devices - 1) / devices,
        "ragged_all_to_all": (devices - 1) / devices,
        "collective_permute": 1,
        "collective_broadcast": 1,
        "send": 1,
    }
    if kind not in factors:
        raise ValueError(f"how many bytes a {kind} puts on the wire is not known; known kinds: {', '.join(factors)}")
    return factors[kind] * bytes


def total_on_wire(entries: Iterable[Collective]) -> Total:
    """Bytes that each device sends over its link, over all collectives. Raises ValueError for an unknown kind."""
    return bounds(entries, lambda entry: bytes_on_wire(entry.kind, entry.participants, entry.bytes))


@dataclass(frozen=True)
class Match:
    """What one step sends for a purpose, and what another sends in its place. Either side may be empty."""

    first: tuple[Collective, ...]
    second: tuple[Collective, ...]

    @property
    def verdict(self) -> str:
        """`the same`, `differs` (in kind or size), `extra` (only in the second) or `missing` (only in the first)."""
        if not self.first:
            return "extra"
        if not self.second:
            return "missing"
        return "the same" if same(totals(self.first), totals(self.second)) else "differs"


def same(first: Mapping[Key, Total], second: Mapping[Key, Total]) -> bool:
    """Whether totals are certainly equal."""
    return first == second and all(total.most is not None for total in first.values())


PURPOSES = {
    "add up": ("all_reduce", "reduce_scatter"),
    "bring": ("all_gather", "all_to_all", "ragged_all_to_all", "collective_permute", "collective_broadcast", "send"),
}
"""Kinds that can stand for one another: an all_reduce whose result is cut for a reduce_scatter, a gather for a ring."""


def match_collectives(first: Sequence[Collective], second: Sequence[Collective]) -> list[Match]:
    """For the collectives of one step, those that another has in their place, and the reverse.

    First by kind and axes, where the bytes over all of them are equal: a partitioner may send in many operations what
    was written as one. Then what is left, by purpose and axes; kinds that are not known only match themselves. What
    has no counterpart then is missing in the second step, or extra.
    """
    found = []
    ours, theirs = by_key(first), by_key(second)
    for key in list(ours):
        if key in theirs and same(totals(ours[key]), totals(theirs[key])):
            found.append(Match(tuple(ours.pop(key)), tuple(theirs.pop(key))))
    others = {kind: (kind,) for kind, _ in (*ours, *theirs) if not any(kind in kinds for kinds in PURPOSES.values())}
    for axes in dict.fromkeys(axes for _, axes in (*ours, *theirs)):
        for kinds in (PURPOSES | others).values():
            sides = [tuple(c for k in kinds for c in side.get((k, axes), ())) for side in (ours, theirs)]
            if any(sides):
                found.append(Match(*sides))
    return found
