"""States that are trained a little, saved, and compared."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from shared.checkpoint.manifest import Manifest, text_hash
from shared.checkpoint.reader import restore_newest
from shared.checkpoint.writer import Writer
from shared.config import Config
from shared.data.batches import Dataset
from shared.model.state import TrainState
from shared.placement.mesh import make_mesh
from shared.twin import Twin
from tests.runs import TEXT, TWINS
from tests.small import small_config
from twinstep.tree import named_leaves


def build(name: str, devices: int, config: Config | None = None) -> Twin:
    config = config or small_config()
    return TWINS[name](config, make_mesh(config.strategy, devices, config.mesh))


def dataset(config: Config) -> Dataset:
    return Dataset(np.frombuffer(TEXT, np.uint8), config.model.seq_len, config.batch, config.seed)


def save_steps(folder: Path, twin: Twin, steps: int, keep: int = 9) -> list[dict[str, np.ndarray]]:
    """Train so many steps and save after each; returns copies of the states' arrays as they were when saved."""
    config = twin.plan.config
    batches, state = dataset(config), twin.init(jax.random.key(0))
    kept = []
    with Writer(folder, keep, Manifest(0, config, text_hash(batches.text), "a test", {})) as writer:
        for done in range(1, steps + 1):
            state, _ = twin.train_step(state, twin.place_batch(batches(done - 1)))
            writer.save(done, state)
            kept.append(arrays(state))
            state, _ = twin.train_step(state, twin.place_batch(batches(99)))  # the saved arrays are donated at once
    return kept


def arrays(state: TrainState) -> dict[str, np.ndarray]:
    plain = dataclasses.replace(state, key=jax.random.key_data(state.key))
    return {name: np.array(leaf) for name, leaf in named_leaves(plain).items()}


def newest(folder: Path, twin: Twin, warn: Callable[[str], None] = pytest.fail) -> tuple[TrainState, int]:
    """The newest good state and its step."""
    found = restore_newest(folder, twin, warn)
    assert found is not None
    return found[0], found[1].step


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name, strict=True)
