"""Time of one training step: both twins and the compute-only twin, one group for each number of devices.

`make bench` runs this and keeps the JSON. It measures the training command's default step and no other, so that
figures of different days are of the same thing; `python -m bench compare` takes any size.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench import device_counts
from bench.timing.timed_step import TIMED_STEPS, TimedStep, interleaved, median_ratio, timed_step
from shared.config import Config
from shared.placement.strategies import STRATEGIES
from twinstep.communication.account import total_bytes

CONFIG = Config()
COUNTS = device_counts(jax.device_count())
RATIOS: list[str] = []

compiled = functools.cache(lambda name, devices: timed_step(name, CONFIG, devices))


@pytest.mark.parametrize("name", TIMED_STEPS)
@pytest.mark.parametrize("devices", COUNTS)
def test_train_step(benchmark: BenchmarkFixture, devices: int, name: str):
    """Compiled, warmed up, with state and batch on the devices, waiting for the end of each step."""
    step: TimedStep = compiled(name, devices)
    benchmark.group = f"train step on {devices} devices"
    tokens = float(np.sum(step.batch.weights))
    benchmark.pedantic(step.run, rounds=10, iterations=1, warmup_rounds=2)
    benchmark.extra_info.update(
        devices=devices,
        twin=name,
        platform=jax.default_backend(),
        simulated=jax.default_backend() == "cpu",
        tokens_per_step=tokens,
        bytes_sent=total_bytes(step.sends).least,
        collectives=[f"{collective.count} {collective.kind}" for collective in step.sends],
    )
    if benchmark.stats:  # none with --benchmark-disable
        benchmark.extra_info["tokens_per_second"] = tokens / benchmark.stats.stats.median


@pytest.mark.parametrize("name", ["auto", "explicit"])
@pytest.mark.parametrize("strategy", [strategy for strategy in STRATEGIES if strategy != CONFIG.strategy])
def test_train_step_of_strategy(benchmark: BenchmarkFixture, strategy: str, name: str):
    """The same model with twice the heads, as most devices need, on all devices there are, under every strategy."""
    config = dataclasses.replace(CONFIG, strategy=strategy, model=dataclasses.replace(CONFIG.model, heads=8))
    step = timed_step(name, config, COUNTS[-1])
    benchmark.group = f"train step of strategies on {COUNTS[-1]} devices"
    benchmark.pedantic(step.run, rounds=5, iterations=1, warmup_rounds=1)
    benchmark.extra_info.update(
        strategy=strategy,
        twin=name,
        platform=jax.default_backend(),
        simulated=jax.default_backend() == "cpu",
        bytes_sent=total_bytes(step.sends).least,
        memory=step.memory and dataclasses.asdict(step.memory),
    )


def test_interleaved_ratios(benchmark: BenchmarkFixture):
    """Explicit over auto, and the share of communication, for every number of devices.

    Times of different moments cannot be divided on a shared machine; these were interleaved. The same collectives
    should cost the same: between 0.90 and 1.15. It is reported, not asserted: benchmarks are no tests.
    """
    timed_steps = {(devices, name): compiled(name, devices) for devices in COUNTS for name in TIMED_STEPS}
    benchmark.group = "all steps, interleaved"
    seconds = benchmark.pedantic(interleaved, args=(timed_steps, 10), rounds=1)
    for devices in COUNTS:
        auto, explicit, bare = (seconds[devices, name] for name in TIMED_STEPS)
        found = {
            "explicit_over_auto": median_ratio(explicit, auto),
            "communication_share_auto": 1 - median_ratio(bare, auto),
            "communication_share_explicit": 1 - median_ratio(bare, explicit),
        }
        benchmark.extra_info[f"{devices} devices"] = found
        RATIOS.append(
            f"{devices} devices: explicit / auto {found['explicit_over_auto']:.2f}, communication "
            f"{found['communication_share_auto']:.0%} of auto, {found['communication_share_explicit']:.0%} of explicit"
        )
