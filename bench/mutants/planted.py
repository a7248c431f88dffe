"""Planted bugs: mistakes that people make, each a small change to a twin's source, and what the check has to say.

An edit names the right lines, as they stand in the twin's file, and the wrong ones in their place; it fails if the
right ones are no longer there. Wrong steps are traced without `shard_map`'s own checks where these would refuse them:
what is tried here is the comparison by itself.
"""

import dataclasses
import importlib
import shutil
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np

from bench.proof.prove import proof_dataset
from shared.model.state import TrainState
from shared.twin import Twin

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Edit:
    """One change to a twin's file."""

    file: str
    right: str
    wrong: str


@dataclass(frozen=True)
class Bug:
    """One row of the table."""

    name: str
    twin: str
    """`auto` or `explicit`."""
    says: str
    """What the message must say of the cause, as a regular expression."""
    leaf: str = r"gradients\.\S+"
    """What leaf the message must name, as a regular expression."""
    edits: tuple[Edit, ...] = ()
    devices: int = 2
    """The smallest number on which it can show."""
    wrap: Callable[[Twin], Twin] = lambda twin: twin
    """A change to how the twin is used, for what is no part of its source."""
    strategy: str = "data_parallel"
    mesh: str = ""
    """Axes and degrees in place of the strategy's own."""
    patch: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Within it the step is built and traced: for mistakes in what both twins stand on."""


class ResumeWithoutCount(Twin):
    """A twin whose resumed state has lost the optimizer's count, on which the learning rate depends."""

    def place_state(self, state: TrainState) -> TrainState:
        zero = jax.tree.map(
            lambda leaf: np.zeros_like(leaf) if np.issubdtype(leaf.dtype, np.integer) else leaf, state.optimizer
        )
        return super().place_state(dataclasses.replace(state, optimizer=zero))


class StaleBatch(Twin):
    """A twin whose last device keeps the rows of the batch before."""

    def place_batch(self, batch: Any) -> Any:
        before = proof_dataset(self.plan.config)(1)
        kept = self.plan.config.batch // self.mesh.size
        return super().place_batch(
            jax.tree.map(lambda new, old: np.concatenate([new[:-kept], old[-kept:]]), batch, before)
        )


def as_subclass(kind: type[Twin]) -> Callable[[Twin], Twin]:
    return lambda twin: kind(**{field.name: getattr(twin, field.name) for field in dataclasses.fields(twin)})


@contextmanager
def planted(bug: Bug) -> Generator[Callable[..., Twin]]:
    """The `build` of a twin with the bug in it. Raises ValueError if the lines to change are not in its source."""
    package = {"auto": "auto_sharding", "explicit": "explicit_shardmap"}[bug.twin]
    with TemporaryDirectory() as folder, bug.patch():
        shutil.copytree(ROOT / package, Path(folder) / package)
        for edit in bug.edits:
            path = Path(folder) / package / edit.file
            source = path.read_text()
            if source.count(edit.right) != 1:
                raise ValueError(f"{bug.name}: {package}/{edit.file} no longer has, once: {edit.right}")
            path.write_text(source.replace(edit.right, edit.wrong))
        with imported_from(folder, package) as module:
            yield lambda *arguments: bug.wrap(module.build(*arguments))


@contextmanager
def imported_from(folder: str, package: str) -> Generator[Any]:
    """Import the package from this folder; afterwards its name refers to the original again."""

    def ours() -> Mapping[str, Any]:
        return {name: module for name, module in sys.modules.items() if name.split(".")[0] == package}

    before = ours()
    for name in before:
        del sys.modules[name]
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module(package)
    finally:
        sys.path.remove(folder)
        for name in ours():
            del sys.modules[name]
        sys.modules.update(before)
