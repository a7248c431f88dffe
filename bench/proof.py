"""The proof that the twins are the same step: everything that a step computes, compared with the single-device step.

It takes a small model with everything switched on that can go wrong: dropout, a mask that leaves one device without a
counted token, clipping, and SGD with learning rate 1, whose update is the gradient (Adam would hide a wrong scale).
The tests prove the same with this file.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from bench import DEVICE_COUNTS, TWINS
from shared import single_device
from shared.config import Config, DType, ModelConfig, OptimizerConfig
from shared.data import Batch, Dataset
from shared.equivalence import Report, compare_results
from shared.placement import find_strategy, make_mesh
from shared.runtime import fast_compilation
from shared.state import TrainState, abstract_state, initial_state
from shared.tolerance import work_behind


def proof_heads(strategy: str) -> int:
    """4, or as many as the strategy splits heads over on 8 devices: the limits of float32 depend on the number."""
    row = find_strategy(strategy)
    degrees = row.degrees(DEVICE_COUNTS[-1])
    return max(4, math.prod(degrees.get(axis, 1) for axis in row.splits()["heads"]))


def proof_config(dtype: DType, strategy: str) -> Config:
    """The small model with everything switched on that can go wrong."""
    return Config(
        model=ModelConfig(
            layers=2,
            width=32,
            heads=proof_heads(strategy),
            hidden=64,
            window=16,
            dropout=0.1,
            remat=False,
            dtype=dtype,
            param_dtype=dtype,
        ),
        optimizer=OptimizerConfig(optimizer="sgd", learning_rate=1, schedule="constant", warmup=0, clip=1),
        batch=16,
        strategy=strategy,
    )


def proof_batch(config: Config) -> Batch:
    """Random tokens, each counted with probability 0.7, but none in the first two rows, device 0's share on 8."""
    random = np.random.default_rng(config.seed)
    text = random.integers(0, config.model.vocabulary, config.batch * config.model.window + 1).astype(np.uint8)
    batch = Dataset(text, config.model.window, config.batch).cut(np.arange(config.batch))
    weights = (random.random(batch.tokens.shape) < 0.7).astype(np.float32)
    weights[:2] = 0
    return dataclasses.replace(batch, weights=weights)


def observe(step: Any, state: TrainState, batch: Batch, copy: Callable[[TrainState], TrainState]) -> dict[str, Any]:
    """Everything that a step computes from a state and a batch, for comparison."""
    calls = [
        (step.loss_and_grads, (state, batch)),
        (step.logits, (state, batch.tokens)),
        (step.train_step, (copy(state), batch)),
    ]
    lowered = [function.lower(*arguments) for function, arguments in calls]
    options = fast_compilation()
    with ThreadPoolExecutor() as pool:  # XLA compiles without holding Python's lock
        compiled = list(pool.map(lambda program: program.compile(compiler_options=options), lowered))
    # One after the other: two programs with collectives in flight can deadlock on simulated devices.
    (loss, gradients, tokens), logits, (after, metrics) = (
        jax.block_until_ready(program(*arguments)) for program, (_, arguments) in zip(compiled, calls, strict=True)
    )
    return {
        "loss": {"loss_and_grads": loss, "train_step": metrics.pop("loss")},
        "metrics": {"tokens of loss_and_grads": tokens, **metrics},
        "logits": logits,
        "gradients": gradients,
        "parameters": after.params,
    }


def prove(
    config: Config,
    counts: Sequence[int],
    say: Callable[[str], None] = lambda message: None,
) -> dict[int, dict[str, Report]]:
    """Compare single-device step, auto twin and explicit twin on each number of devices.

    Returns for each number of devices the reports of the pairs `single / auto`, `single / explicit` and
    `auto / explicit`, with the groups loss, metrics, logits, gradients and parameters.
    """
    batch, dtype = proof_batch(config), config.model.dtype
    # Accelerators multiply float32 matrices in fewer bits unless told otherwise.
    with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision("highest"):
        work = work_behind(abstract_state(config).params, batch)
        state = initial_state(config, jax.random.key(config.seed))
        say(f"proving {dtype}: one device, without a mesh")
        single = observe(single_device.build(config), state, batch, lambda state: state)
        found = {}
        for devices in counts:
            results = {"single": single}
            for name, build in TWINS.items():
                say(f"proving {dtype}: {name} on {devices}")
                twin = build(config, make_mesh(config.strategy, devices, config.mesh))
                results[name] = observe(twin, twin.place_state(state), twin.place_batch(batch), twin.place_state)
            found[devices] = {
                f"{one} / {other}": compare_results(results[one], results[other], work, dtype=dtype)
                for one, other in itertools.combinations(results, 2)
            }
    return found
