"""Saving the states of a run (Orbax), so that what is restored (reader.py) can be verified.

DIR/120/state holds the arrays after step 120 by name, and DIR/120/manifest (manifest.py) what they belong to and a
digest of each: Orbax itself loads flipped bytes and casts types without an error. Each of several processes writes what
its own devices hold.
"""

import dataclasses
import functools
import shutil
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from shared.checkpoint.digest import digests
from shared.checkpoint.errors import as_input_error, quiet
from shared.checkpoint.manifest import Manifest, StoredArray, saved_steps
from shared.config import InputError, check
from shared.model.state import TrainState, abstract_state
from shared.runtime import processes
from shared.runtime.compilation import fast_compilation
from twinstep.tree import named_leaves

REMEDY = "give --checkpoint-dir a folder to write to"


class Writer:
    """Saves states of one run while it trains. A context; leaving it waits for the last save.

    Entering raises ValueError if the directory cannot be written to.
    """

    def __init__(self, directory: Path, keep: int, manifest: Manifest):
        self.directory, self.keep, self.manifest = directory, keep, manifest
        self.saved: int | None = None

    def __enter__(self) -> "Writer":
        # Directories are created before the threads that write into them start: where that fails, Orbax's threads would
        # wait for them for 20 minutes, and Python, at its exit, for the threads.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self.keep,
            cleanup_tmp_directories=True,
            async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),
        )
        with ExitStack() as stack:
            stack.enter_context(quiet())
            self.make_room()
            with as_input_error(f"cannot write checkpoints to {self.directory}", REMEDY):
                self.manager = ocp.CheckpointManager(self.directory.absolute(), options=options)
            self.stack = stack.pop_all()
        return self

    def __exit__(self, kind: Any, *error: object) -> None:
        with self.stack:
            if kind is None:
                self.wait()
                self.manager.close()
            elif jax.process_count() == 1:
                with suppress(Exception):  # what ends the run is reported, not what follows from it
                    self.manager.close()
            # With several processes, one that failed may not wait for the others, which may be lost.

    def make_room(self) -> None:
        """Create the directory, remove unfinished saves and all but the newest `keep` steps, and check the free space.

        Raises ValueError, in all processes, if it cannot be written to or has no space for a checkpoint.
        """
        problem = ""
        if processes.is_first():
            try:
                with as_input_error(f"cannot write checkpoints to {self.directory}", REMEDY):
                    self.directory.mkdir(parents=True, exist_ok=True)
                    for path in self.directory.glob("*.orbax-checkpoint-tmp"):
                        shutil.rmtree(path)
                    for step in saved_steps(self.directory)[self.keep :]:
                        shutil.rmtree(self.directory / str(step))
                    disk = shutil.disk_usage(self.directory)
                leaves = stored_leaves(abstract_state(self.manifest.config))
                size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values())
                check(
                    size <= disk.free or disk.total == 0,  # a file system that does not report its size
                    f"a checkpoint has {size:,} bytes, but {self.directory} only {disk.free:,} bytes of free space; "
                    "make room, or give another --checkpoint-dir",
                )
            except InputError as error:
                problem = str(error)
        problem = processes.first_problem(problem)
        check(not problem, problem)

    def save(self, step: int, state: TrainState) -> None:
        """Begin to save the state after this step; returns when its arrays may be donated.

        Raises ValueError if the state holds numbers that are not finite, or if this or the previous save failed.
        """
        if step == self.saved:
            return
        self.wait()
        leaves = stored_leaves(state)
        bad = not_finite(leaves)
        check(not bad, f"not saved: the state after step {step} has numbers in {bad} that are not finite; try --clip 1")
        described = {
            name: StoredArray(leaves[name].shape, str(leaves[name].dtype), digest)
            for name, digest in digests(leaves).items()
        }
        key_type = str(jax.random.key_impl(state.key))
        manifest = dataclasses.replace(self.manifest, step=step, leaves=described, key_type=key_type)
        with self.reported(step):
            self.manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(leaves), manifest=ocp.args.JsonSave(manifest.to_json())
                ),
            )
        self.saved = step

    def wait(self) -> None:
        """Wait until the save that was begun is committed. Raises ValueError, naming its step, if it failed."""
        with self.reported(self.saved):
            self.manager.wait_until_finished()
            self.manager.check_for_errors()

    def reported(self, step: int | None) -> AbstractContextManager[None]:
        """Turn errors of saving this step into one line that says which checkpoints remain."""
        kept = saved_steps(self.directory)
        remain = f"the newest checkpoint there is that of step {kept[0]}" if kept else "no checkpoint is there yet"
        return as_input_error(f"cannot save step {step} to {self.directory}", remain)


def stored_leaves(state: TrainState) -> dict[str, Any]:
    """The state's arrays by name, the random key as its data (uint32)."""
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
