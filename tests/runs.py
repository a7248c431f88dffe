"""Short training runs with checkpoints, inside this process."""

import json
from pathlib import Path
from typing import Any

import numpy as np

import auto_sharding
import explicit_shardmap
from shared.cli.main import COMMANDS, parse
from shared.cli.train import TrainCommand, run_train

TWINS = {"auto_sharding": auto_sharding.build, "explicit_shardmap": explicit_shardmap.build}
SMALL = ["--layers", "1", "--d-model", "16", "--heads", "2", "--d-ff", "32", "--seq-len", "16", "--batch", "8"]
COMPILED_ONCE = {
    "JAX_COMPILATION_CACHE_DIR": str(Path(__file__).parent.parent / ".jax_cache"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
"""Environment in which processes that a test starts find what another has compiled."""
TEXT = b"the quick brown fox jumps over the lazy dog. " * 40


def train(folder: Path, *options: Any, twin: str = "auto_sharding", text: bytes = TEXT) -> int:
    """`train` on a small text, with a metrics file beside the checkpoints; returns the exit code."""
    folder.mkdir(exist_ok=True)
    (folder / "text").write_bytes(text)
    fixed = ["train", *SMALL, "--dropout", "0.1", "--validation", "0", "--data", folder / "text"]
    kept = ["--metrics", folder / "metrics.jsonl", "--checkpoint-dir", folder / "checkpoints"]
    command = parse(
        {name: kind for name, (kind, _) in COMMANDS.items()}, twin, list(map(str, [*fixed, *kept, *options]))
    )
    assert isinstance(command, TrainCommand)
    return run_train(TWINS[twin], twin, command)


def losses(folder: Path) -> np.ndarray:
    """The loss of every step that `train` recorded, (steps,) in order."""
    by_step = recorded_losses(folder / "metrics.jsonl")
    assert list(by_step) == list(range(1, len(by_step) + 1))
    return np.array(list(by_step.values()))


def recorded_losses(metrics: Path) -> dict[int, float]:
    """Step to loss in a metrics file, the last record of each step counting."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}
