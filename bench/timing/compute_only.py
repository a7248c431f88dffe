"""The explicit step without its communication: what a step would take if sending cost nothing.

Each collective is replaced by a local stand-in with a result of the same shape, so that the program computes what it
did before and sends nothing. The results are wrong on more than one device, and only their time is of use.
"""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import Array, lax

import explicit_shardmap
from shared.config import Config
from shared.placement.mesh import make_mesh
from shared.twin import Twin
from twinstep.communication.compiled import compile_readable


def kept(values: Any, *axes: Any, **options: Any) -> Any:
    """In place of `lax.pmean`, `psum`, `pmax`, `ppermute` and `pcast`."""
    return values


def gathered(values: Array, name: str, *, axis: int, **options: Any) -> Array:
    """In place of `lax.all_gather`: this device's piece, for all others too."""
    return jnp.concatenate([values] * lax.axis_size(name), axis)


def scattered(values: Array, name: str, *, scatter_dimension: int, **options: Any) -> Array:
    """In place of `lax.psum_scatter`: the first piece of what this device has."""
    return lax.slice_in_dim(values, 0, values.shape[scatter_dimension] // lax.axis_size(name), axis=scatter_dimension)


def exchanged(values: Array, axis_name: str, split_axis: int, concat_axis: int, **options: Any) -> Array:
    """In place of `lax.all_to_all`: the pieces for others stay here."""
    return jnp.concatenate(jnp.split(values, lax.axis_size(axis_name), split_axis), concat_axis)


STAND_INS: Any = {
    **dict.fromkeys(("pmean", "psum", "pmax", "ppermute", "pcast"), kept),
    "all_gather": gathered,
    "psum_scatter": scattered,
    "all_to_all": exchanged,
}


@contextmanager
def local_stand_ins() -> Generator[None]:
    """Within it, steps are traced without communication. Checks are off: results that differ pass for replicated."""
    unchecked = partial(jax.shard_map, check_vma=False)
    with (
        mock.patch.multiple(lax, **STAND_INS),
        mock.patch.object(jax, "shard_map", unchecked),
    ):
        yield


def compile_compute_only(config: Config, devices: int) -> tuple[Twin, jax.stages.Compiled]:
    """The compute-only twin (to place states with) and its compiled training step."""
    with local_stand_ins():
        twin = explicit_shardmap.build(config, make_mesh(config.strategy, devices, config.mesh))
        return twin, compile_readable(twin.train_step, *twin.shapes())
