"""Restoring a state that `shared/checkpoint/writer.py` saved: what was saved, or not at all.

Every array is read into host memory, one at a time, and checked against the digest in its step's manifest before it is
placed. A step that does not verify is skipped for the one before. Several processes agree on a step, since all must
resume from the same one.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from shared.checkpoint.digest import digest
from shared.checkpoint.errors import one_line, quiet
from shared.checkpoint.manifest import Manifest, read_manifest, saved_steps
from shared.checkpoint.writer import stored_leaves
from shared.config import InputError, check
from shared.model.state import TrainState, abstract_state
from shared.placement.placing import place_leaf
from shared.runtime import processes
from shared.runtime.keys import KEY_TYPE
from shared.twin import Twin
from twinstep.tree import named_leaves

DAMAGED = "damaged"
"""Folder inside DIR into which `--resume` moves steps that cannot be restored, so that they can be saved again."""


@dataclass(frozen=True)
class VerifiedStep:
    """One step in a checkpoint directory, after all of it was read."""

    step: int
    bytes: int
    """On disk."""
    manifest: Manifest | None
    problem: str
    """Why it cannot be restored; empty if every array verifies."""


def verify(directory: Path, step: int) -> VerifiedStep:
    """Read a step into host memory, array by array, in this process alone, and check it against its manifest."""
    folder = directory / str(step)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    manifest = None
    try:
        manifest = step_manifest(directory, step)
        for _ in verified_arrays(directory, manifest):
            pass
    except InputError as error:
        return VerifiedStep(step, size, manifest, str(error))
    return VerifiedStep(step, size, manifest, "")


def step_manifest(directory: Path, step: int) -> Manifest:
    """The manifest of a step. Raises ValueError if it is damaged, or that of a different step."""
    manifest = read_manifest(directory / str(step))
    check(manifest.step == step, f"its manifest is that of step {manifest.step}")
    return manifest


def verified_arrays(directory: Path, manifest: Manifest) -> Iterator[tuple[str, np.ndarray]]:
    """Name and contents of each array of a step, one in memory at a time, without waiting for another process.

    Raises ValueError at the first that cannot be read or is not what was saved. (One at a time also because Orbax, when
    one of several cannot be read, abandons the others, which then print tracebacks.)
    """
    own = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=own, active_processes={own})
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    reader = ocp.Checkpointer(handler, multiprocessing_options=alone)
    folder = directory.absolute() / str(manifest.step) / "state"
    for name, leaf in manifest.leaves.items():
        as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray)}
        wanted = ocp.args.PyTreeRestore(item={name: 0}, restore_args=as_numpy, partial_restore=True)
        try:
            with quiet():
                array = reader.restore(folder, args=wanted)[name]
        except Exception as error:  # whatever Orbax and TensorStore make of damaged files
            raise InputError(f"{name} cannot be read: {one_line(error)}") from None
        found, saved = f"{array.dtype}{list(array.shape)}", f"{leaf.dtype}{list(leaf.shape)}"
        check(found == saved, f"{name} is {found}, but was saved as {saved}")
        check(digest(array) == leaf.digest, f"{name} is not what was saved: its digest differs")
        yield name, array


def restore_newest(
    directory: Path, twin: Twin, warn: Callable[[str], None], fits: Callable[[Manifest], None] = lambda manifest: None
) -> tuple[TrainState, Manifest] | None:
    """Return the newest state that verifies, placed for this twin; None if the directory has no step at all.

    fits: called with a manifest before its arrays are read, to raise if they do not fit this run. warn: called with a
    line for each newer step that is skipped. Raises ValueError if there are steps and none verifies. All processes get
    the same answer.
    """
    problems = []
    for step in processes.from_first(saved_steps(directory)):
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
        warn(f"warning: skipping step {step}: {problem}")
    check(
        not problems,
        f"no step in {directory} can be restored ({'; '.join(problems)}); start again in another --checkpoint-dir",
    )
    return None


def restore(directory: Path, manifest: Manifest, twin: Twin) -> TrainState:
    """Return the state of one step, placed for this twin, whatever mesh or twin it was saved from.

    Every process reads all arrays and places its own devices' shards. Raises ValueError if an array cannot be
    read, is not what was saved, or does not fit the twin's configuration.
    """
    check(
        manifest.key_type == KEY_TYPE,
        f"its random key is of type {manifest.key_type}, and steps are computed with {KEY_TYPE}",
    )
    layout, like = twin.plan.layout, abstract_state(twin.plan.config)
    specs = named_leaves(layout.state)
    fitting = {name: (leaf.shape, str(leaf.dtype)) for name, leaf in stored_leaves(like).items()}
    stored = {name: (leaf.shape, leaf.dtype) for name, leaf in manifest.leaves.items()}
    differing = [name for name in fitting | stored if fitting.get(name) != stored.get(name)]
    check(not differing, f"{', '.join(differing[:3])} of checkpoint and configuration differ in shape or type")
    placed = {name: place_leaf(layout.mesh, array, specs[name]) for name, array in verified_arrays(directory, manifest)}
    placed["key"] = jax.random.wrap_key_data(placed["key"], impl=KEY_TYPE)
    return jax.tree.unflatten(jax.tree.structure(like), [placed[name] for name in named_leaves(like)])


def set_aside(directory: Path, step: int) -> None:
    """Move the steps after this one, which cannot be restored, to DIR/damaged: the run will save them again."""
    if processes.is_first():
        for newer in saved_steps(directory):
            if newer > step:
                target = directory / DAMAGED / f"{newer}.{time.time_ns()}"
                target.parent.mkdir(exist_ok=True)
                (directory / str(newer)).rename(target)
    processes.wait_for_all("set_aside")
