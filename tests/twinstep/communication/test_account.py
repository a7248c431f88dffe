"""The account of communication: what was asked for, what it sends, what stands in its place, and what it costs."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from bench import TWINS
from bench.ledger import microbench, one_step
from bench.ledger.microbench import KINDS, fit, measure, put_in
from bench.ledger.one_step import LedgerCommand
from bench.proof.prove import proof_config
from shared.placement.mesh import make_mesh
from shared.placement.strategies import STRATEGIES
from tests.small import small_config
from twinstep.communication.account import Collective, Operand, matched, sent, totals
from twinstep.communication.compiled import collectives, compile_readable
from twinstep.communication.traced import requested


def entry(
    kind: str, bytes: int, devices: int = 4, axes: tuple[str, ...] = ("data",), count: int | None = 1
) -> Collective:
    return Collective(kind, axes, devices, (Operand(bytes, "", "somewhere.py:1"),), count)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_compiled_program_does_what_the_author_asked_for(strategy: str):
    """By name, in the explicit twin's source: the same kinds, axes, bytes and lines. Nobody asks in the auto twin."""
    config = proof_config("float32", strategy)
    mesh = make_mesh(strategy, 8)
    twin = TWINS["explicit"](config, mesh)
    asked = requested(twin.train_step, twin.shapes(), mesh)
    compiled = collectives(compile_readable(twin.train_step, *twin.shapes()), mesh)
    assert totals(asked) == totals(compiled) != {}
    assert {c.source for c in compiled} <= {c.source for c in asked}
    assert all(c.source.startswith("explicit_shardmap/") for c in asked)
    auto = TWINS["auto"](config, mesh)
    assert requested(auto.train_step, auto.shapes(), mesh) == []


def test_loops_and_transposes_are_counted_in_the_trace():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), (AxisType.Auto,) * 2)

    def step(x: jax.Array) -> jax.Array:
        def loss(x: jax.Array) -> jax.Array:
            def body(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
                return jnp.sin(lax.all_gather(carry, "tensor", tiled=True)[: x.shape[0]]), None

            return lax.scan(body, x, length=3)[0].sum()

        return jax.grad(loss)(x)

    program = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("tensor"), out_specs=P("tensor")))
    found = requested(program, (jnp.ones(32),), mesh)
    assert [(c.kind, c.axes, c.participants, c.bytes, c.count) for c in found] == [
        ("all_gather", ("tensor",), 4, 32, 3),
        ("reduce_scatter", ("tensor",), 4, 128, 3),
    ]
    assert all(c.source.startswith("tests/twinstep/communication/test_account.py:") for c in found)
    compiled = collectives(compile_readable(program, jnp.ones(32)), mesh)
    assert totals(compiled) == totals(found)


@pytest.mark.parametrize(
    ("kind", "factor"),
    [("all_reduce", 1.5), ("all_gather", 3), ("reduce_scatter", 0.75), ("all_to_all", 0.75), ("collective_permute", 1)],
)
def test_bytes_sent_on_a_ring(kind: str, factor: float):
    """By hand for 4 devices that put in 1,000 bytes each."""
    assert sent(kind, 4, 1000) == 1000 * factor
    assert entry(kind, 1000, count=5).total_sent == 5000 * factor


def test_what_stands_in_the_place_of_what():
    """Equal bytes of a kind are the same in however many operations; then an all_reduce stands for a reduce_scatter."""
    explicit = [entry("all_gather", 100), entry("reduce_scatter", 400), entry("all_reduce", 8)]
    auto = [entry("all_reduce", 410), entry("all_gather", 50, count=2), entry("collective_permute", 16)]
    found = {
        (tuple(c.kind for c in m.explicit), tuple(c.kind for c in m.auto)): m.verdict for m in matched(explicit, auto)
    }
    assert found == {
        (("all_gather",), ("all_gather",)): "the same",
        (("reduce_scatter", "all_reduce"), ("all_reduce",)): "otherwise",
        ((), ("collective_permute",)): "surplus",
    }
    (missing,) = matched([entry("all_to_all", 64)], [])
    assert missing.verdict == "missing"


def test_other_axes_are_no_match():
    (one, other) = matched([entry("all_reduce", 8)], [entry("all_reduce", 8, axes=("tensor",))])
    assert {one.verdict, other.verdict} == {"missing", "surplus"}


def test_a_line_is_found_again():
    """Latency and bandwidth from times that are made of them."""
    times = {size: 2e-4 + sent("all_gather", 8, put_in("all_gather", 8, size)) / 3e9 for size in microbench.SIZES}
    assert fit("all_gather", 8, times) == pytest.approx((2e-4, 3e9))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_timed_is_this_kind_and_size(kind: str):
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), (AxisType.Auto,) * 2)
    program, x, _ = microbench.repeated(kind, mesh, ("tensor",), 4096)
    np.testing.assert_array_equal(program(x), x)
    again = jax.jit(
        jax.shard_map(
            lambda x: KINDS[kind](x, ("tensor",)),
            mesh=mesh,
            in_specs=P(("data", "tensor")),
            out_specs=P(("data", "tensor")),
        )
    )
    (found,) = collectives(compile_readable(again, x), mesh)
    assert (found.kind, found.axes, found.bytes) == (kind, ("tensor",), put_in(kind, 4, 4096))
    (cost,) = measure(mesh, ("tensor",), [kind], sizes=(1024, 65536), rounds=1)
    assert cost.predict(1024) > 0


def test_ledger_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(one_step, "SIZES", (1024, 65536))
    path = tmp_path / "ledger.json"
    assert one_step.run(LedgerCommand(small_config(), devices=2, json=path)) == 0
    printed = capsys.readouterr().out
    for expected in (
        "one training step, data_parallel over data 2",
        "explicit_shardmap/data_parallel.py:",
        "predicted for auto: all_reduce over data",
        "the same: 1 all_reduce over data,",
        "expected from cost and bytes",
        "in the profile, waiting included",
    ):
        assert expected in printed
    data = json.loads(path.read_text())
    assert data["as_predicted"] == {"auto": True, "explicit": True}
    assert [match["verdict"] for match in data["matches"]] == ["the same"]
    (explicit,) = data["compiled"]["explicit"]
    assert explicit["sent_per_device"] == explicit["bytes"] == data["requested"][0]["bytes"]
    assert data["measured"]["expected_seconds"]["explicit"] > 0
    (time,) = data["measured"]["profiled_seconds"]["explicit"]["all_reduce"].values()
    assert time > 0


def test_a_step_that_sends_what_nobody_predicted_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """As a compiler upgrade might, or a careless edit."""
    honest = one_step.timed_step

    def careless(name: str, *arguments):
        step = honest(name, *arguments)
        if name == "auto":
            step.sends.append(entry("all_gather", 1234, devices=2))
        return step

    monkeypatch.setattr(one_step, "timed_step", careless)
    assert one_step.run(LedgerCommand(small_config(), devices=2, measure=False)) == 1
    printed = capsys.readouterr().out
    assert "NOT as compiled" in printed
    assert "surplus: nothing / 1 all_gather over data, 1,234 bytes" in printed


def test_errors_come_before_the_work():
    with pytest.raises(ValueError, match="one device sends nothing; give --devices 2 or more"):
        one_step.run(LedgerCommand(small_config(), devices=1))
    with pytest.raises(ValueError, match="no strategy is called 'nonsense'"):
        one_step.run(LedgerCommand(small_config(strategy="nonsense"), devices=2))
