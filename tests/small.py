"""The smallest configuration that is still a transformer with two blocks."""

import dataclasses
from typing import Any

from shared.config import Config, ModelConfig, OptimizerConfig


def small_config(**changes: Any) -> Config:
    """A model of two blocks and d_model 16, without dropout. `changes` may name fields of any of the three classes."""
    parts = {
        ModelConfig: {"layers": 2, "d_model": 16, "heads": 2, "d_ff": 32, "seq_len": 8, "remat": False},
        OptimizerConfig: {"warmup": 0},
        Config: {"batch": 8, "steps": 5},
    }
    for kind, values in parts.items():
        names = {field.name for field in dataclasses.fields(kind)} - {"model", "optimizer"} | (
            {"optimizer"} if kind is OptimizerConfig else set()
        )
        values.update({name: changes.pop(name) for name in list(changes) if name in names})
    assert not changes, f"no such fields: {changes}"
    return Config(
        model=ModelConfig(**parts[ModelConfig]), optimizer=OptimizerConfig(**parts[OptimizerConfig]), **parts[Config]
    )
