"""The ledger's command, and the cost of each kind of collective."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from bench.ledger import microbench, one_step
from bench.ledger.microbench import KINDS, fit, input_bytes, measure_costs
from bench.ledger.one_step import LedgerCommand
from tests.small import small_config
from twinstep import collectives
from twinstep.communication.account import bytes_on_wire
from twinstep.communication.entries import Collective, Operand


def test_a_line_is_found_again():
    """Latency and bandwidth from times that are made of them."""
    times = {
        size: 2e-4 + bytes_on_wire("all_gather", 8, input_bytes("all_gather", 8, size)) / 3e9
        for size in microbench.SIZES
    }
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
    (found,) = collectives(again, x, mesh=mesh)
    assert (found.kind, found.axes, found.bytes) == (kind, ("tensor",), input_bytes(kind, 4, 4096))
    (cost,) = measure_costs(mesh, ("tensor",), [kind], sizes=(1024, 65536), rounds=1)
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
    assert explicit["sent_per_device"] == explicit["bytes"] == data["traced"][0]["bytes"]
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
            step.sends.append(
                Collective("all_gather", ("data",), 2, (Operand(1234, "float32", "", "somewhere.py:1"),), 1)
            )
        return step

    monkeypatch.setattr(one_step, "timed_step", careless)
    assert one_step.run(LedgerCommand(small_config(), devices=2, measure=False)) == 1
    printed = capsys.readouterr().out
    assert "NOT as compiled" in printed
    assert "extra: nothing / 1 all_gather over data, 1,234 bytes" in printed


def test_errors_come_before_the_work():
    with pytest.raises(ValueError, match="one device sends nothing; give --devices 2 or more"):
        one_step.run(LedgerCommand(small_config(), devices=1))
    with pytest.raises(ValueError, match="no strategy is called 'nonsense'"):
        one_step.run(LedgerCommand(small_config(strategy="nonsense"), devices=2))
