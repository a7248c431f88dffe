"""Time of generated text: with attention keys and values kept, and with the whole window computed for every token.

With the default model, untrained: the time does not depend on the weights.
"""

import dataclasses

import jax
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench import TWINS, device_counts
from shared.config import Config
from shared.generation.generate import generate
from shared.placement.mesh import make_mesh
from shared.placement.strategies import find_strategy
from shared.runtime.keys import random_key

TOKENS = 100
COUNTS = sorted({1, device_counts(jax.device_count())[-1]})


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "whole window"])
@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize("devices", COUNTS)
def test_generate(benchmark: BenchmarkFixture, devices: int, name: str, cached: bool):
    """TOKENS tokens in each row, a row on each device; they are compiled before, and read as they are made."""
    config = Config()
    mesh = make_mesh(config.strategy, devices)
    rows = find_strategy(config.strategy).batch_devices(mesh.shape)
    twin = TWINS[name](dataclasses.replace(config, batch=rows), mesh)
    state = twin.init(random_key(0))

    def run() -> None:
        assert len(list(generate(twin, state, b"ROMEO:", TOKENS, cached=cached))) == TOKENS

    benchmark.group = f"{TOKENS} tokens on {devices} devices"
    benchmark.pedantic(run, rounds=5, iterations=1, warmup_rounds=1)
    if benchmark.stats:  # none with --benchmark-disable
        speed = TOKENS / benchmark.stats.stats.median
        benchmark.extra_info.update(devices=devices, twin=name, cached=cached, rows=rows, tokens_per_second=speed)
