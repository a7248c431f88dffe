"""Totals, bytes on the wire, and what stands in the place of what."""

import pytest

from twinstep.communication.account import (
    Total,
    bytes_on_wire,
    match_collectives,
    total_on_wire,
)
from twinstep.communication.entries import Collective, Operand


def entry(
    kind: str, bytes: int, devices: int = 4, axes: tuple[str, ...] = ("data",), count: int | None = 1
) -> Collective:
    return Collective(kind, axes, devices, (Operand(bytes, "float32", "", "somewhere.py:1"),), count)


@pytest.mark.parametrize(
    ("kind", "factor"),
    [("all_reduce", 1.5), ("all_gather", 3), ("reduce_scatter", 0.75), ("all_to_all", 0.75), ("collective_permute", 1)],
)
def test_bytes_sent_on_a_ring(kind: str, factor: float):
    """By hand for 4 devices that put in 1,000 bytes each."""
    assert bytes_on_wire(kind, 4, 1000) == 1000 * factor
    assert total_on_wire([entry(kind, 1000, count=5)]) == Total(5000 * factor, 5000 * factor)


def test_what_stands_in_the_place_of_what():
    """Equal bytes of a kind are the same in however many operations; then an all_reduce stands for a reduce_scatter."""
    explicit = [entry("all_gather", 100), entry("reduce_scatter", 400), entry("all_reduce", 8)]
    auto = [entry("all_reduce", 410), entry("all_gather", 50, count=2), entry("collective_permute", 16)]
    found = {
        (tuple(c.kind for c in m.first), tuple(c.kind for c in m.second)): m.verdict
        for m in match_collectives(explicit, auto)
    }
    assert found == {
        (("all_gather",), ("all_gather",)): "the same",
        (("all_reduce", "reduce_scatter"), ("all_reduce",)): "differs",
        ((), ("collective_permute",)): "extra",
    }
    (missing,) = match_collectives([entry("all_to_all", 64)], [])
    assert missing.verdict == "missing"


def test_other_axes_are_no_match():
    (one, other) = match_collectives([entry("all_reduce", 8)], [entry("all_reduce", 8, axes=("tensor",))])
    assert {one.verdict, other.verdict} == {"missing", "extra"}
