"""Checkpoints of a run (Orbax), of which what is restored is what was saved, or is not restored.

DIR/120/state holds the arrays after step 120 by name, and DIR/120/manifest (shared/manifest.py) what they belong to and
a digest of each. Orbax itself loads flipped bytes and casts types without a word. Several processes write each what its
own devices hold, and agree on which step is good, since all must go on from the same one.
"""

import dataclasses
import functools
import logging
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from shared import processes
from shared.config import InputError, check
from shared.digest import digest, digests
from shared.manifest import Leaf, Manifest, numbered_steps, read_manifest
from shared.runtime import fast_compilation
from shared.state import TrainState, abstract_state
from shared.tree import named_leaves
from shared.twin import Twin

# Orbax logs its every move, and errors that it raises as well, once for each array.
for chatty in ("absl", "asyncio"):
    logging.getLogger(chatty).setLevel(logging.CRITICAL)
tell_unraisable = sys.unraisablehook


def tell_no_leftovers(unraisable: Any) -> None:
    """When a save fails, TensorStore still calls into the event loop that Orbax has closed: that is no news."""
    if "Event loop is closed" not in str(unraisable.exc_value):
        tell_unraisable(unraisable)


sys.unraisablehook = tell_no_leftovers
DAMAGED = "damaged"
"""Folder inside DIR into which `--resume` moves steps that cannot be restored, so that they can be saved again."""


class Writer:
    """Saves states of one run while it goes on. Use as a context: leaving it waits for the last save.

    Raises ValueError if the directory cannot be written to.
    """

    def __init__(self, directory: Path, keep: int, manifest: Manifest):
        self.directory, self.manifest = directory, manifest
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        with plain_errors(f"cannot write checkpoints to {directory}", "give --checkpoint-dir a folder to write to"):
            directory.mkdir(parents=True, exist_ok=True)
            self.manager = ocp.CheckpointManager(directory.absolute(), options=options)
        self.saved: int | None = None

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: Any, *error: object) -> None:
        if kind is None or jax.process_count() == 1:
            self.wait()
            self.manager.close()
        # With several processes, one that failed may not wait for the others, which may be lost.

    def save(self, step: int, state: TrainState) -> None:
        """Begin to save the state after this step; returns when its arrays may be donated.

        Raises ValueError if the state holds numbers that are not finite, or if this or the previous save failed.
        """
        if step == self.saved:
            return
        leaves = stored_leaves(state)
        bad = not_finite(leaves)
        check(not bad, f"not saved: the state after step {step} has numbers in {bad} that are not finite; try --clip 1")
        described = {
            name: Leaf(leaves[name].shape, str(leaves[name].dtype), digest) for name, digest in digests(leaves).items()
        }
        manifest = dataclasses.replace(self.manifest, step=step, leaves=described)
        with plain_errors(f"cannot save step {step} to {self.directory}", "earlier checkpoints are kept"):
            self.manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(leaves), manifest=ocp.args.JsonSave(manifest.to_json())
                ),
            )
        self.saved = step

    def wait(self) -> None:
        """Until what was begun is saved. Raises ValueError if it could not be."""
        with plain_errors(f"cannot save step {self.saved} to {self.directory}", "earlier checkpoints are kept"):
            self.manager.wait_until_finished()
            self.manager.check_for_errors()


@dataclass(frozen=True)
class Found:
    """One step in a checkpoint directory, and what reading all of it showed."""

    step: int
    bytes: int
    """On disk."""
    manifest: Manifest | None
    problem: str
    """Why it cannot be restored; empty if every array is what was saved."""


def verify(directory: Path, step: int) -> Found:
    """Read a step into host memory, array by array, in this process alone, and hold it to its manifest."""
    folder = directory / str(step)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    manifest = None
    try:
        manifest = step_manifest(directory, step)
        for _ in verified_arrays(directory, manifest):
            pass
    except InputError as error:
        return Found(step, size, manifest, str(error))
    return Found(step, size, manifest, "")


def step_manifest(directory: Path, step: int) -> Manifest:
    """The manifest of a step. Raises ValueError if it is not whole, or not that of this step."""
    manifest = read_manifest(directory / str(step))
    check(manifest.step == step, f"its manifest is that of step {manifest.step}")
    return manifest


def verified_arrays(directory: Path, manifest: Manifest) -> Iterator[tuple[str, np.ndarray]]:
    """Name and contents of each array of a step, one in memory at a time, without waiting for another process.

    Raises ValueError at the first that cannot be read or is not what was saved. (One at a time also because Orbax, when
    one of several cannot be read, leaves the others behind, and they print tracebacks.)
    """
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    reader = ocp.Checkpointer(handler, multiprocessing_options=alone)
    folder = directory.absolute() / str(manifest.step) / "state"
    for name, leaf in manifest.leaves.items():
        how = {name: ocp.RestoreArgs(restore_type=np.ndarray)}
        wanted = ocp.args.PyTreeRestore(item={name: 0}, restore_args=how, partial_restore=True)
        try:
            array = reader.restore(folder, args=wanted)[name]
        except Exception as error:  # whatever Orbax and TensorStore make of damaged files
            raise InputError(f"{name} cannot be read: {one_line(error)}") from None
        there, before = f"{array.dtype}{list(array.shape)}", f"{leaf.dtype}{list(leaf.shape)}"
        check(there == before, f"{name} is {there}, but was saved as {before}")
        check(digest(array) == leaf.digest, f"{name} is not what was saved: its digest differs")
        yield name, array


def restore_newest(
    directory: Path, twin: Twin, warn: Callable[[str], None], fits: Callable[[Manifest], None] = lambda manifest: None
) -> tuple[TrainState, Manifest] | None:
    """The newest state that is what was saved, placed for this twin; None if the directory has no step at all.

    fits: called with a manifest before its arrays are read, to raise if they are of no use. warn: called with a line
    for each newer step that is passed over. Raises ValueError if there are steps and none is good. All processes get
    the same answer.
    """
    problems = []
    for step in processes.from_first(numbered_steps(directory)):
        manifest = state = None
        problem = ""
        try:
            manifest = step_manifest(directory, step)
        except InputError as error:
            problem = str(error)
        problem = processes.first_problem(problem)
        if manifest is not None and not problem:
            fits(manifest)
            try:
                state = restore(directory, manifest, twin)
            except InputError as error:
                problem = str(error)
            problem = processes.first_problem(problem)
            if state is not None and not problem:
                return state, manifest
        problems.append(f"step {step}: {problem}")
        warn(f"warning: passing over step {step}: {problem}")
    check(
        not problems,
        f"no step in {directory} can be restored ({'; '.join(problems)}); start anew in another --checkpoint-dir",
    )
    return None


def restore(directory: Path, manifest: Manifest, twin: Twin) -> TrainState:
    """The state of one step, placed for this twin, whatever mesh or twin it was saved from.

    Every process reads all arrays, and puts on its devices what they hold. Raises ValueError if an array cannot be
    read, is not what was saved, or does not fit the twin's configuration.
    """
    layout, like = twin.plan.layout, abstract_state(twin.plan.config)
    specs = named_leaves(layout.state)
    fitting = {name: (leaf.shape, str(leaf.dtype)) for name, leaf in stored_leaves(like).items()}
    stored = {name: (leaf.shape, leaf.dtype) for name, leaf in manifest.leaves.items()}
    differing = [name for name in fitting | stored if fitting.get(name) != stored.get(name)]
    check(not differing, f"{', '.join(differing[:3])} of checkpoint and configuration differ in shape or type")
    placed = {name: layout.place_leaf(array, specs[name]) for name, array in verified_arrays(directory, manifest)}
    placed["key"] = jax.random.wrap_key_data(placed["key"])
    return jax.tree.unflatten(jax.tree.structure(like), [placed[name] for name in named_leaves(like)])


def set_aside(directory: Path, step: int) -> None:
    """Move the steps after this one, which cannot be restored, to DIR/damaged: the run will save them again."""
    if processes.is_first():
        for newer in numbered_steps(directory):
            if newer > step:
                target = directory / DAMAGED / f"{newer}.{time.time_ns()}"
                target.parent.mkdir(exist_ok=True)
                (directory / str(newer)).rename(target)
    processes.wait_for_all("set_aside")


def stored_leaves(state: TrainState) -> dict[str, Any]:
    """The state's arrays by name, with the random key as the numbers it is made of."""
    key = state.key
    if isinstance(key, jax.ShapeDtypeStruct):
        data = jax.eval_shape(jax.random.key_data, key)
        data = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=key.sharding)
    else:
        data = jax.random.key_data(key)
    return named_leaves(dataclasses.replace(state, key=data))


def not_finite(leaves: dict[str, Any]) -> str:
    """The names of the arrays with numbers that are not finite."""
    floats = {name: leaf for name, leaf in leaves.items() if jnp.issubdtype(leaf.dtype, jnp.floating)}
    finite = jax.device_get(all_finite()(floats))
    return ", ".join(name for name, good in finite.items() if not good)


@functools.cache
def all_finite() -> Any:
    """Whether each of a dictionary of arrays holds only finite numbers, as one program."""
    finite = partial(jax.tree.map, lambda leaf: jnp.isfinite(leaf).all())
    return jax.jit(finite, compiler_options=fast_compilation())


@contextmanager
def plain_errors(what: str, remedy: str) -> Generator[None]:
    """Within it, anything that goes wrong raises InputError with one line."""
    try:
        yield
    except Exception as error:
        if processes.is_loss(error):
            raise
        raise InputError(f"{what}: {one_line(error)}; {remedy}") from None


def one_line(error: Exception) -> str:
    """The beginning of an error's message, which Orbax and TensorStore spread over many lines."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if len(lines[0]) < 200 else f"{lines[0][:200]}…"
