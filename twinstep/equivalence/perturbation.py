"""The scale of rounding, measured: how far a result moves when its inputs move by one unit in the last place.

Rounding every input once, at random, is what a correct computation in another order does at each of its steps. So the
movement says how large the numbers are that a leaf's rounding is in proportion to, which the leaf itself does not say
where they cancel. (TTrace, arXiv 2506.09280, takes tolerances for training steps from such a perturbation.)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from twinstep.equivalence.arguments import Arguments, is_floating
from twinstep.equivalence.leaves import is_number, norm, plain

DRAWS = 3
"""The middle one counts: a draw that by chance moves a single number next to nothing does not make a limit too strict,
nor one that crosses a threshold (a step of a schedule, a maximum) make it too wide."""


def nudged(leaf: Any, random: np.random.Generator, dtype: Any = None) -> Any:
    """The array with each number moved by one unit in the last place, up or down at random; zero and infinity stay.

    dtype: the type whose unit it is, where computations are done in a shorter one than the array's.
    """
    values = np.asarray(leaf)
    shorter = dtype is not None and jnp.finfo(dtype).eps > jnp.finfo(values.dtype).eps
    short = values.astype(jnp.dtype(dtype)) if shorter else values
    towards = np.where(random.random(values.shape) < 0.5, -np.inf, np.inf).astype(short.dtype)
    with np.errstate(all="ignore"):
        step = np.nextafter(short, towards).astype(np.float64) - short.astype(np.float64)
        moved = np.where((values == 0) | ~np.isfinite(values), values, values.astype(np.float64) + step).astype(
            values.dtype
        )
    if not isinstance(leaf, jax.Array):
        return moved[()]
    return jax.device_put(moved, leaf.sharding) if leaf.committed else jnp.asarray(moved)


def nudged_tree(tree: Any, seed: int, dtype: Any = None) -> Any:
    """The tree with its floating arrays nudged."""
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: nudged(leaf, random, dtype) if is_floating(leaf) else leaf, tree)


def movement(
    run: Callable[[Arguments], Mapping[str, Any]],
    arguments: Arguments,
    results: Mapping[str, Any],
    dtype: Any = None,
) -> dict[str, float]:
    """How far each floating leaf of run's results moves, as a norm: the middle of a few draws.

    run: called with nudged arguments; what it returns of the arguments as they are is `results`, leaves by name.
    dtype: that of `nudged`.
    """
    if not arguments.dtypes():
        return {}
    draws = []
    for seed in range(DRAWS):
        random = np.random.default_rng(seed)
        draws.append(run(arguments.replaced(lambda leaf, random=random: nudged(leaf, random, dtype))))
    return moved(results, draws)


def moved(results: Mapping[str, Any], draws: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The middle distance of the draws' floating leaves from those of results; both are leaves by name."""
    found: dict[str, float] = {}
    for name, leaf in results.items():
        if not is_number(leaf):
            continue
        left = plain(leaf)
        if not jnp.issubdtype(left.dtype, jnp.floating):
            continue
        lengths = []
        for draw in draws:
            right = plain(draw[name]) if name in draw and is_number(draw[name]) else left
            if right.shape == left.shape:
                with np.errstate(all="ignore"):
                    lengths.append(norm(right.astype(np.float64) - left.astype(np.float64)))
        lengths = sorted(length for length in lengths if math.isfinite(length))
        found[name] = lengths[len(lengths) // 2] if lengths else 0.0
    return found
