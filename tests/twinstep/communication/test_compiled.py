"""What is read out of compiled programs."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.twinstep.communication.steps import X, loop, mapped, reduced, serialized, two_by_four
from twinstep import collectives
from twinstep.communication.account import Total, totals
from twinstep.communication.compiled import read_program
from twinstep.communication.hlo import HloModule, Program
from twinstep.communication.loops import Value, trip_count, turns, worked_out


def test_every_kind_and_axis():
    """Each collective once, over known axes of a 2 x 4 mesh; float32 pieces of 4 x 4."""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), (AxisType.Auto,) * 2)

    def everything(x: jax.Array) -> jax.Array:
        swapped = lax.ppermute(x, "data", [(0, 1), (1, 0)])
        gathered = lax.all_gather(x, "tensor")
        scattered = lax.psum_scatter(x, "tensor", tiled=True)
        exchanged = lax.all_to_all(x, "tensor", 0, 0, tiled=True)
        both = lax.psum(jnp.sin(x), ("data", "tensor"))
        one = lax.psum(jnp.cos(x), "data")
        return x + swapped + gathered.sum() + scattered.sum() + exchanged + both + one

    program = jax.jit(jax.shard_map(everything, mesh=mesh, in_specs=P("data", "tensor"), out_specs=P("data", "tensor")))
    found = collectives(program, jnp.ones((8, 16)))
    assert sorted((c.kind, c.axes, c.participants, c.bytes, c.count) for c in found) == [
        ("all_gather", ("tensor",), 4, 64, 1),
        ("all_reduce", ("data",), 2, 64, 1),
        ("all_reduce", ("data", "tensor"), 8, 64, 1),
        ("all_to_all", ("tensor",), 4, 64, 1),
        ("collective_permute", ("data",), 2, 64, 1),
        ("reduce_scatter", ("tensor",), 4, 64, 1),
    ]
    assert all(c.source.startswith("tests/twinstep/communication/test_compiled.py:") for c in found)


def test_loops_are_counted():
    """A collective in a loop's body stands in the program once and runs as often as the loop turns."""
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))

    def nested(x: jax.Array) -> jax.Array:
        def inner(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return lax.pcast(lax.pmean(jnp.sin(x), "data"), "data", to="varying"), None

        def outer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return lax.scan(inner, x, length=3)[0], None

        return lax.scan(outer, x, length=5)[0]

    program = jax.jit(jax.shard_map(nested, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    (found,) = collectives(program, jnp.ones(8))
    assert (found.kind, found.count, found.bytes, found.total_bytes) == ("all_reduce", 15, 4, 60)


def test_a_loop_of_unknown_length_is_said_to_be():
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))

    def until_small(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda x: x[0] > 1e-3, lambda x: lax.pmean(x, "data") / 2, lax.pmean(x, "data"))

    program = jax.jit(jax.shard_map(until_small, mesh=mesh, in_specs=P("data"), out_specs=P()))
    counts = sorted((c.count or 0) for c in collectives(program, jnp.ones(8)))
    assert counts[0] == 0


LOOPS = {
    "i += 2": (loop(lambda s: s[0] < 10, lambda i: i + 2), 5),
    "from 3": (loop(lambda s: s[0] < 10, lambda i: i + 1, start=3), 7),
    "<=": (loop(lambda s: s[0] <= 10, lambda i: i + 1), 11),
    "by 3, beyond the end": (loop(lambda s: s[0] < 10, lambda i: i + 3), 4),
    "down": (loop(lambda s: s[0] > 2, lambda i: i - 2, start=9), 4),
    "!=": (loop(lambda s: s[0] != 6, lambda i: i + 2), 3),
    "constant on the left": (loop(lambda s: s[0] > -7, lambda i: i + -3), 3),
    "unsigned": (loop(lambda s: s[0] < 200, lambda i: i + 50, dtype=jnp.uint8), 4),
    "never": (loop(lambda s: s[0] < 0, lambda i: i + 1), 0),
    "another condition": (loop(lambda s: (s[0] < 100) & (s[1][0, 0] < 5), lambda i: i + 1), None),
    "a condition on values": (loop(lambda s: s[1][0, 0] < 5, lambda i: i + 1), None),
    "i = 2 * i + 1": (loop(lambda s: s[0] < 10, lambda i: 2 * i + 1), None),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_counted_by_start_step_and_comparison(name: str):
    """By XLA's note where there is one, and worked out as for a TPU, whose programs have none: never wrongly."""
    step, expected = LOOPS[name]
    program = Program(serialized(step))
    found = read_program(program.module.SerializeToString(), two_by_four())
    assert {c.count for c in found} <= {expected}
    for loop_ in [i for i in program.instructions.values() if i.opcode == "while"]:
        assert worked_out(program, Value(loop_)) == expected
        loop_.backend_config = b""
        assert trip_count(program, Value(loop_)) == expected


def test_a_loop_that_would_wrap_around_is_unknown():
    assert turns(0, 250, 100, "LT", ("uint8", 8)) is None
    assert turns(0, 250, 100, "LT", ("int32", 32)) == 3
    assert turns(5, 0, -1, "GE", ("uint8", 8)) is None
    assert turns(0, 5, 2, "NE", ("int32", 32)) is None
    assert turns(0, 5, -1, "LT", ("int32", 32)) is None


def test_a_condition_that_communicates_runs_once_more_than_the_body():
    """In a program in which XLA is made to say how often the body runs."""

    def goes_on(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        return (state[0] < 10) & (lax.psum(state[1], ("data", "tensor")).sum() < 1e9)

    step = mapped(lambda x: lax.while_loop(goes_on, lambda s: (s[0] + 1, reduced(s[1])), (0, x))[1])
    found = collectives(step, X)
    assert {c.axes: c.count for c in found} == {("data", "tensor"): None, ("tensor",): None}
    module = HloModule.FromString(serialized(step))
    for instruction in (i for c in module.computations for i in c.instructions if i.opcode == "while"):
        instruction.backend_config = b'{"known_trip_count": {"n": "10"}}'
    found = read_program(module.SerializeToString(), two_by_four())
    assert {c.axes: c.count for c in found} == {("data", "tensor"): 11, ("tensor",): 10}


def test_branches_are_marked_and_totals_give_least_and_most():
    def step(x: jax.Array) -> jax.Array:
        twice = lax.switch(
            jnp.int32(x[0, 0]), [lambda x: x, reduced, lambda x: reduced(reduced(x) ** 2), lambda x: 2 * x], x
        )
        return reduced(twice)

    found = collectives(mapped(step), X)
    assert [tuple((b.index, b.branches) for b in c.branch) for c in found] == [((1, 4),), ((2, 4),), ((2, 4),), ()]
    assert totals(found) == {("all_reduce", ("tensor",)): Total(64, 192)}
    assert "in branch 2 of 4 of conditional 1" in str(found[1])


def test_groups_and_pairs_that_are_not_those_of_an_axis():
    groups = mapped(lambda x: x + lax.psum(x, "tensor", axis_index_groups=[[0, 1], [2, 3]]), check_vma=False)
    (found,) = collectives(groups, X)
    assert (found.axes, found.participants, found.bytes) == ((), 2, 64)
    (found,) = collectives(mapped(lambda x: lax.ppermute(x, "tensor", [(2, 0)])), X)
    assert (found.kind, found.axes, found.participants) == ("collective_permute", (), 2)
    (found,) = collectives(mapped(lambda x: lax.ppermute(x, "tensor", [(0, 1), (1, 2), (2, 3)])), X)
    assert (found.axes, found.participants) == (("tensor",), 4)


def test_the_mesh_is_found_or_said_to_be_missing():
    """In arguments, in the source, in a compiled program's shardings; else an error that names the remedy."""
    mesh = two_by_four()
    step = mapped(reduced)
    wanted = [("tensor",)]
    assert [c.axes for c in collectives(step, X)] == wanted
    assert [c.axes for c in collectives(step.lower(X), mesh=mesh)] == wanted
    placed = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=jax.NamedSharding(mesh, P(None, "tensor")))
    summed = jax.jit(lambda x: x.sum())
    assert [c.axes for c in collectives(summed, placed)] == wanted
    assert [c.axes for c in collectives(summed.lower(placed).compile())] == wanted
    with pytest.raises(ValueError, match=r"its mesh cannot be found; give it as mesh=: a jax\.sharding\.Mesh"):
        read_program(serialized(step), None)
    with pytest.raises(ValueError, match=r"for more devices than the 4 of the mesh \(other=4\)"):
        collectives(step, X, mesh=jax.make_mesh((4,), ("other",), (AxisType.Auto,), devices=jax.devices()[:4]))
    other = jax.NamedSharding(jax.make_mesh((8,), ("other",), (AxisType.Auto,)), P())
    with pytest.raises(ValueError, match=r"several meshes, \(other=8\) and \(data=2, tensor=4\)"):
        collectives(step, jax.device_put(X, other))


def test_what_cannot_be_read_is_an_error():
    with pytest.raises(ValueError, match="reduced is not jitted"):
        collectives(reduced, X)
    with pytest.raises(ValueError, match="compiled already"):
        collectives(mapped(reduced).lower(X), X)


def test_a_pmapped_function():
    (found,) = collectives(jax.pmap(lambda x: lax.psum(x, "devices"), "devices"), X)
    assert (found.kind, found.axes, found.bytes) == ("all_reduce", ("devices",), 64)


def test_scopes_are_those_of_anybody():
    """Named scopes, and nothing that JAX or jnp put into the name."""

    def step(x: jax.Array) -> jax.Array:
        def loss(x: jax.Array) -> jax.Array:
            with jax.named_scope("encoder"):
                x, _ = lax.scan(lambda c, _: (jnp.sin(jnp.einsum("ij,jk->ik", c, c)), None), x, length=2)
            with jax.named_scope("head"):
                return (x**2).sum()

        return jax.grad(loss)(x)

    shape = jax.ShapeDtypeStruct((8, 8), "float32", sharding=jax.NamedSharding(two_by_four(), P("data", "tensor")))
    scopes = {operand.scope for c in collectives(jax.jit(step), shape) for operand in c.operands}
    assert "encoder" in scopes
    assert scopes <= {"encoder", "head", ""}
