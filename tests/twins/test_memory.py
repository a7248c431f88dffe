"""What strategies are for: memory, as the compiler plans it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import pytest

import auto_sharding.fsdp
from bench import TWINS
from bench.ledger import all_strategies
from bench.ledger.all_strategies import StrategiesCommand
from shared.config import Config, ModelConfig
from shared.model.state import abstract_state
from shared.model.transformer import unchanged
from shared.placement.mesh import make_mesh
from shared.placement.strategies import STRATEGIES
from twinstep.communication.memory import Memory, memory


def planned(name: str, config: Config, devices: int) -> Memory:
    twin = TWINS[name](config, make_mesh(config.strategy, devices))
    return memory(twin.train_step.lower(*twin.shapes()).compile())


def sized(strategy: str, batch: int, **model: Any) -> Config:
    return Config(model=ModelConfig(layers=2, d_model=128, d_ff=512, unroll=1, **model), batch=batch, strategy=strategy)


def test_fsdp_and_the_constraint_that_it_needs(monkeypatch: pytest.MonkeyPatch):
    """Without it the auto twin splits activations by the layout of the parameters, and holds the whole batch."""
    config = sized("fsdp", 32, seq_len=128)
    whole = planned("explicit", dataclasses.replace(config, strategy="data_parallel"), 8)
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract_state(config).params))
    auto, explicit = (planned(name, config, 8) for name in TWINS)
    assert auto.arguments == explicit.arguments < whole.arguments / 6
    assert whole.arguments > 3 * state, "parameters and two moments"
    assert 0.7 < explicit.peak / auto.peak < 1.4
    monkeypatch.setattr(auto_sharding.step, "residual", lambda layout: unchanged)
    assert planned("auto", config, 8).peak > 2 * auto.peak


def test_zero_1_splits_the_optimizer_state():
    config = sized("zero_1", 32, seq_len=128)
    whole = planned("explicit", dataclasses.replace(config, strategy="data_parallel"), 8)
    for name in TWINS:
        assert planned(name, config, 8).arguments < whole.arguments / 2


@pytest.mark.parametrize("strategy", ["context_parallel", pytest.param("ulysses", marks=pytest.mark.slow)])
def test_long_windows_take_less_on_more_devices(strategy: str):
    """In a ring a device meets one block of keys at a time, so that scores fall with the square of the number."""
    config = sized(strategy, 1, seq_len=1024, heads=8)
    one, many = (planned("explicit", config, devices) for devices in (1, 8))
    assert many.temporary < one.temporary / (16 if strategy == "context_parallel" else 4)
    assert planned("auto", config, 8).temporary < one.temporary / 4


def test_the_table_that_the_pages_show(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    """What a row says is what the program has: all that pure data parallelism sends is one all-reduce."""
    monkeypatch.setattr(all_strategies, "STRATEGIES", {"data_parallel": STRATEGIES["data_parallel"]})
    path = tmp_path / "strategies.json"
    config = sized("data_parallel", 32, seq_len=64)
    assert all_strategies.run(StrategiesCommand(config, devices=8, json=path)) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["twin"] for row in rows] == ["auto", "explicit"]
    for row in rows:
        assert 0 < row["arguments"] < row["arguments"] + row["temporary"] <= row["peak"]
        assert list(row["input_bytes"]) == ["all_reduce"]
        assert row["bytes_on_wire"] == 2 * 7 / 8 * row["input_bytes"]["all_reduce"]
        assert row["as_predicted"]
    assert "data_parallel  explicit" in capsys.readouterr().out
