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
from jax import lax

import explicit_shardmap
from shared.collectives import compile_readable
from shared.config import Config
from shared.placement import make_mesh
from shared.twin import Twin


def unchanged(values: Any, axes: Any, **options: Any) -> Any:
    """In place of `lax.pmean` and `lax.pcast`."""
    return values


@contextmanager
def local_stand_ins() -> Generator[None]:
    """Within it, steps are traced without communication. Checks are off: results that differ pass for replicated."""
    unchecked = partial(jax.shard_map, check_vma=False)
    with (
        mock.patch.multiple(lax, pmean=unchanged, pcast=unchanged),
        mock.patch.object(jax, "shard_map", unchecked),
    ):
        yield


def compile_compute_only(config: Config, devices: int) -> tuple[Twin, jax.stages.Compiled]:
    """The compute-only twin (to place states with) and its compiled training step."""
    with local_stand_ins():
        twin = explicit_shardmap.build(config, make_mesh(config.strategy, devices))
        return twin, compile_readable(twin.train_step, *twin.shapes())
