"""What is read out of a function's source."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.twinstep.communication.steps import X, mapped, reduced, two_by_four
from twinstep import collectives, traced_collectives
from twinstep.communication import traced
from twinstep.communication.account import Total, bytes_on_wire, totals


def test_loops_and_transposes_are_counted_in_the_trace():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), (AxisType.Auto,) * 2)

    def step(x: jax.Array) -> jax.Array:
        def loss(x: jax.Array) -> jax.Array:
            def body(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
                return jnp.sin(lax.all_gather(carry, "tensor", tiled=True)[: x.shape[0]]), None

            return lax.scan(body, x, length=3)[0].sum()

        return jax.grad(loss)(x)

    program = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("tensor"), out_specs=P("tensor")))
    found = traced_collectives(program, jnp.ones(32))
    assert [(c.kind, c.axes, c.participants, c.bytes, c.count) for c in found] == [
        ("all_gather", ("tensor",), 4, 32, 3),
        ("reduce_scatter", ("tensor",), 4, 128, 3),
    ]
    assert all(c.source.startswith("tests/twinstep/communication/test_traced.py:") for c in found)
    compiled = collectives(program, jnp.ones(32))
    assert totals(compiled) == totals(found)


def test_groups_and_pairs_are_counted_as_they_are():
    groups = mapped(lambda x: x + lax.psum(x, "tensor", axis_index_groups=[[0, 1], [2, 3]]), check_vma=False)
    pair, chain = ([(2, 0)], [(0, 1), (1, 2), (2, 3)])
    steps = [groups, *(mapped(lambda x, p=p: lax.ppermute(x, "tensor", p)) for p in (pair, chain))]
    for step in steps:
        (written,), (compiled,) = traced_collectives(step, X), collectives(step, X)
        assert (written.axes, written.participants, written.bytes) == (
            compiled.axes,
            compiled.participants,
            compiled.bytes,
        )
    assert traced_collectives(mapped(lambda x: lax.ppermute(x, "tensor", [(1, 1)])), X) == []


def test_branches_and_loops_of_unknown_length():
    def step(x: jax.Array) -> jax.Array:
        x = lax.cond(x[0, 0] > 0, reduced, lambda x: x, x)
        return lax.while_loop(lambda x: x[0, 0] < 5, reduced, x)

    inside, loop = traced_collectives(mapped(step), X)
    assert [(b.index, b.branches) for b in inside.branch] == [(1, 2)]
    assert (inside.count, loop.count) == (1, None)
    assert totals([inside]) == {("all_reduce", ("tensor",)): Total(0, 64)}
    assert totals([inside, loop]) == {("all_reduce", ("tensor",)): Total(0, None)}


def test_ragged_all_to_all_is_not_silent():
    def exchange(out: jax.Array, x: jax.Array, zeros: jax.Array, ones: jax.Array) -> jax.Array:
        return lax.ragged_all_to_all(out, x, zeros, ones, zeros, ones, axis_name="tensor")

    step = jax.jit(jax.shard_map(exchange, mesh=two_by_four(), in_specs=P(), out_specs=P("tensor"), check_vma=False))
    numbers = jnp.arange(4, dtype=jnp.int32)
    (found,) = traced_collectives(step, jnp.ones(16), jnp.ones(16), 0 * numbers, 1 + 0 * numbers)
    assert (found.kind, found.axes, found.bytes) == ("ragged_all_to_all", ("tensor",), 64)


def test_an_unknown_primitive_over_an_axis_is_listed_by_its_name(monkeypatch: pytest.MonkeyPatch):
    """As a later JAX may have: here the reader does not know an all_gather."""
    monkeypatch.delitem(traced.PRIMITIVES, "all_gather")
    (found,) = traced_collectives(mapped(lambda x: x + lax.all_gather(x, "tensor").sum(0)), X)
    assert (found.kind, found.axes, found.bytes) == ("all_gather", ("tensor",), 64)
    with pytest.raises(ValueError, match="how many bytes a gossip puts on the wire is not known"):
        bytes_on_wire("gossip", 4, 64)


def test_pmapped_and_other_functions():
    (found,) = traced_collectives(jax.pmap(lambda x: lax.psum(x, "devices"), "devices"), X)
    assert (found.kind, found.axes, found.bytes) == ("all_reduce", ("devices",), 64)
    with pytest.raises(ValueError, match="reduced is not jitted"):
        traced_collectives(reduced, X)
    with pytest.raises(ValueError, match="compiled already"):
        traced_collectives(mapped(reduced).lower(X))
    with pytest.raises(ValueError, match=r"for mesh \(data=2, tensor=4\), not \(other=8\)"):
        traced_collectives(mapped(reduced), X, mesh=jax.make_mesh((8,), ("other",), (AxisType.Auto,)))
