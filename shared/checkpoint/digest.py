"""A digest of an array's contents that does not depend on how the array is sharded.

Libraries' hashes need the whole array on one host; this one is computed where the shards are.
"""

import functools
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from shared.runtime.compilation import fast_compilation

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}
"""Bytes per number to the type its bits are read as; eight bytes are read as two words."""

SEEDS = (np.uint32(1), np.uint32(0x9E3779B9))


def digests(leaves: Mapping[str, Array]) -> dict[str, str]:
    """Return the `digest` of each array, computed on its devices in one program, once it is there."""
    found = jax.device_get(compiled_digests()(dict(leaves)))
    return {name: as_text(sums) for name, sums in found.items()}


def digest(array: np.ndarray) -> str:
    """Return sixteen hexadecimal digits for an array's contents.

    Each 32-bit word is hashed together with its index, and the hashes are added modulo 2**32, twice with different
    seeds. A sum does not depend on the order or the device of its terms: this is the digest of the global array, the
    same on any mesh. It detects flipped bits, lost pieces and exchanged ones; it is no defence against a forged
    checkpoint. Hash: the finalizer of MurmurHash3 (Appleby, public domain).
    """
    unsigned = UNSIGNED[array.dtype.itemsize]
    words = np.ascontiguousarray(array).reshape(*array.shape, 1).view(unsigned)
    if array.dtype.itemsize != 8:
        words = words[..., 0]
    return as_text(hash_sums(words, np))


@functools.cache
def compiled_digests() -> Any:
    """Compile the digests of a dictionary of arrays as one program."""

    def sums(array: Array) -> Array:
        words = lax.bitcast_convert_type(array, UNSIGNED[array.dtype.itemsize])
        return jnp.stack(hash_sums(words, jnp))

    return jax.jit(partial(jax.tree.map, sums), compiler_options=fast_compilation())


def hash_sums(words: Any, xp: Any) -> list[Any]:
    """Return the two sums (uint32) of unsigned words of any shape; xp is numpy or jax.numpy."""
    words = words.astype(xp.uint32).reshape(words.shape or (1,))
    index = xp.zeros((), xp.uint32)
    stride = 1
    for dimension in reversed(range(words.ndim)):
        along = xp.arange(words.shape[dimension], dtype=xp.uint32) * xp.asarray([stride % 2**32], xp.uint32)
        index = index + along.reshape(-1, *[1] * (words.ndim - 1 - dimension))
        stride *= words.shape[dimension]
    return [xp.sum(murmur_finalizer(words ^ murmur_finalizer(index + seed)), dtype=xp.uint32) for seed in SEEDS]


def murmur_finalizer(words: Any) -> Any:
    """Permute the 32-bit numbers such that every input bit flips half of the output bits on average."""
    words = (words ^ (words >> 16)) * np.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * np.uint32(0xC2B2AE35)
    return words ^ (words >> 16)


def as_text(sums: Any) -> str:
    """Two sums as hexadecimal digits."""
    return "".join(f"{int(half):08x}" for half in sums)
