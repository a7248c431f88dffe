"""A digest of an array's contents that does not depend on how the array is split over devices."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from shared.runtime import fast_compilation

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}
"""Bytes of a number to the type its bits are read as; eight bytes are read as two numbers."""

SEEDS = (np.uint32(1), np.uint32(0x9E3779B9))


def digests(leaves: Mapping[str, Any]) -> dict[str, str]:
    """Sixteen hexadecimal digits for each array, on devices or in numpy. Waits for them.

    Each 32-bit word is hashed together with its place, and the hashes are added modulo 2**32, twice with different
    seeds. A sum does not care in which order, or on which device, its terms are added: this is the digest of the
    global array, the same on any mesh. It finds flipped bits, lost pieces and exchanged ones; it is no defence against
    someone who forges a checkpoint. Hash: the finaliser of MurmurHash3 (Appleby, public domain).
    """
    readable = {name: bits(leaf) if isinstance(leaf, np.ndarray) else leaf for name, leaf in leaves.items()}
    found = jax.device_get(compiled_digests()(readable))
    return {name: "".join(f"{int(half):08x}" for half in halves) for name, halves in found.items()}


def bits(array: np.ndarray) -> np.ndarray:
    """The array's bits as unsigned numbers, which JAX takes as they are even where 64-bit types are off."""
    array = np.ascontiguousarray(array).reshape(array.shape)  # the first makes a vector of a scalar
    unsigned = UNSIGNED[array.dtype.itemsize]
    return array[..., None].view(unsigned) if array.dtype.itemsize == 8 else array.view(unsigned)


@functools.cache
def compiled_digests() -> Any:
    """The digests of a dictionary of arrays as one program; the program is cheap, and rarely run."""
    return jax.jit(lambda leaves: jax.tree.map(digest, leaves), compiler_options=fast_compilation())


def digest(array: Array) -> Array:
    """(2,) uint32."""
    words = lax.bitcast_convert_type(array, UNSIGNED[array.dtype.itemsize]).astype(jnp.uint32)
    place = jnp.uint32(0)
    stride = 1
    for dimension in reversed(range(words.ndim)):
        place += lax.broadcasted_iota(jnp.uint32, words.shape, dimension) * jnp.uint32(stride % 2**32)
        stride *= words.shape[dimension]
    return jnp.stack([jnp.sum(mix(words ^ mix(place + seed)), dtype=jnp.uint32) for seed in SEEDS])


def mix(words: Array) -> Array:
    """A permutation of the 32-bit numbers in which every bit of the input moves half of the output's."""
    words = (words ^ (words >> 16)) * np.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * np.uint32(0xC2B2AE35)
    return words ^ (words >> 16)
