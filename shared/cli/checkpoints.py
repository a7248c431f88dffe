"""`inspect` and `roundtrip`: list a folder of checkpoints, and verify that saving and restoring works."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from shared.checkpoint.manifest import Manifest, flat, saved_steps, text_hash
from shared.cli.preparation import requested_devices
from shared.config import Config, check
from shared.data.batches import Dataset
from shared.data.corpus import read_corpus
from shared.model.state import live_model
from shared.placement.mesh import make_mesh
from shared.runtime import startup
from shared.runtime.keys import random_key
from shared.runtime.processes import Cluster
from shared.twin import Twin


@dataclass(frozen=True)
class InspectCommand:
    """List the checkpoints in a folder: steps, sizes, configuration, and whether each verifies."""

    checkpoint_dir: Annotated[Path, tyro.conf.Positional]
    """Folder that `train --checkpoint-dir` saved to."""


def run_inspect(build: Callable[..., Twin], program: str, command: InspectCommand) -> int:
    """Print the list; returns the exit code: 0 if every step verifies, 1 if one does not."""
    from shared.checkpoint.reader import verify

    folder = command.checkpoint_dir
    steps = saved_steps(folder)
    check(bool(steps), f"no checkpoint in {folder}; give a folder that `train` saved to")
    startup.start(1)
    console = Console(highlight=False, soft_wrap=True, width=None if Console().is_terminal else 200)
    table = Table("step", "bytes", "arrays", "saved by", box=None, pad_edge=False)
    table.columns[-1].no_wrap = True
    table.add_column("verifies", overflow="fold")
    configs: dict[str, list[int]] = {}
    damaged = 0
    for step in reversed(steps):
        found = verify(folder, step)
        manifest = found.manifest
        verdict = "yes" if not found.problem else f"NO: {found.problem}"
        damaged += bool(found.problem)
        arrays, saved_by = ("?", "?") if manifest is None else (str(len(manifest.leaves)), manifest.program)
        table.add_row(str(step), f"{found.bytes:,}", arrays, saved_by, verdict.replace("[", r"\["))
        if manifest is not None:
            described = ", ".join(f"{name}={value}" for name, value in flat(manifest.config).items())
            configs.setdefault(f"{described}\ntraining text: {manifest.text}", []).append(step)
    console.print(table)
    for described, having in configs.items():
        console.print(f"\nconfiguration of step {', '.join(map(str, having))}:\n{described}", markup=False)
    return 1 if damaged else 0


@dataclass(frozen=True)
class RoundtripCommand:
    """Save weights with Orbax, restore them into a fresh model, and verify that the logits match."""

    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)
    devices: int | None = None
    """Number of devices; by default as many as --mesh says, all there are, or 4 simulated ones."""


def run_roundtrip(build: Callable[..., Twin], program: str, command: RoundtripCommand) -> int:
    """Print the result; returns the exit code: 0 if the logits match bit for bit, 1 if not."""
    from shared.checkpoint.reader import restore_newest
    from shared.checkpoint.writer import Writer

    config = command.config
    dataset = Dataset(read_corpus("python-docs"), config.model.seq_len, config.batch, config.seed)
    float64 = "float64" in (config.model.dtype, config.model.param_dtype)
    _, devices = startup.start_all(Cluster(), requested_devices(config, command.devices), float64=float64)
    twin = build(config, make_mesh(config.strategy, devices, config.mesh))
    batch = twin.place_batch(dataset(0))
    state, _ = twin.train_step(twin.init(random_key(config.seed)), batch)
    before = np.asarray(twin.logits(state, batch.tokens))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Writer(folder, 1, Manifest(0, config, text_hash(dataset.text), program, {})) as writer:
            writer.save(1, state)
        fresh = twin.init(random_key(config.seed ^ 1))
        other = np.asarray(twin.logits(fresh, batch.tokens))
        found = restore_newest(folder, twin, print)
        assert found is not None
        restored, manifest = found
    after = np.asarray(twin.logits(restored, batch.tokens))
    model = live_model(config, restored)  # an ordinary NNX module, called without the twin
    called = np.asarray(model(batch.tokens))
    difference = np.abs(called.astype(np.float64) - before).max() / np.abs(before).max()
    equal = np.array_equal(before, after) and difference < 1e-2
    print(f"saved and restored {len(manifest.leaves)} arrays on {devices} devices with {program}")
    print(f"logits of a fresh model: differ by up to {np.abs(other - before).max():.2g}")
    print(f"logits after restoring:  {'equal, bit for bit' if np.array_equal(before, after) else 'NOT EQUAL'}")
    print(f"restored NNX module called by itself: within {difference:.1e} of them")
    return 0 if equal else 1
