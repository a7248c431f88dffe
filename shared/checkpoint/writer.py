"""Saving the states of a run (Orbax), so that what is restored (reader.py) can be verified.

DIR/120/state holds the arrays after step 120 by name, and DIR/120/manifest (manifest.py) what they belong to and
a digest of each. Orbax itself would load flipped bytes and cast types without a word. Of several processes, each writes
what its own devices hold.
"""

import dataclasses
import functools
import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from shared.checkpoint.digest import digests
from shared.checkpoint.manifest import Manifest, StoredArray
from shared.config import InputError, check
from shared.model.state import TrainState
from shared.runtime import processes
from shared.runtime.compilation import fast_compilation
from twinstep.tree import named_leaves

# Orbax logs its every move, and errors that it raises as well, once for each array.
for chatty in ("absl", "asyncio"):
    logging.getLogger(chatty).setLevel(logging.CRITICAL)
tell_unraisable = sys.unraisablehook


def tell_no_leftovers(unraisable: Any) -> None:
    """When a save fails, TensorStore still calls into the event loop that Orbax has closed: that is no news."""
    if "Event loop is closed" not in str(unraisable.exc_value):
        tell_unraisable(unraisable)


sys.unraisablehook = tell_no_leftovers


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
            name: StoredArray(leaves[name].shape, str(leaves[name].dtype), digest)
            for name, digest in digests(leaves).items()
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
