"""What a kind of step is, the data that all of them learn, and the mistakes that are made in each."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

RANDOM = np.random.default_rng(3)
X = RANDOM.normal(size=(16, 6)).astype(np.float32)
Y = RANDOM.normal(size=(16, 3)).astype(np.float32)
BATCH = {"x": X, "y": Y}


@dataclass(frozen=True)
class Mistake:
    """A wrong step: what it does with the batch and with the gradients before they are used."""

    name: str = "none"
    batch: Callable[[Any], Any] = lambda batch: batch
    gradients: Callable[[Any], Any] = lambda gradients: gradients


def halved(batch: Any) -> Any:
    """The first half twice: a device that never sees its own rows."""
    return jax.tree.map(lambda leaf: jnp.concatenate([leaf[: len(leaf) // 2]] * 2), batch)


def rolled(batch: Any) -> Any:
    return {**batch, "y": jnp.roll(batch["y"], 1, axis=0)} if "y" in batch else {"x": jnp.roll(batch["x"], 1, axis=1)}


def without_the_first(gradients: Any) -> Any:
    leaves, structure = jax.tree.flatten(gradients)
    return jax.tree.unflatten(structure, [jnp.zeros_like(leaves[0]), *leaves[1:]])


def shortened(gradients: Any) -> Any:
    """Reduced in a type four bits shorter than the parameters' own."""

    def short(leaf: Any) -> Any:
        dtype = jnp.float8_e4m3fn if leaf.dtype == jnp.bfloat16 else jnp.bfloat16
        return jax.lax.reduce_precision(leaf, 8, 3 if dtype == jnp.float8_e4m3fn else 7)

    return jax.tree.map(short, gradients)


MISTAKES = (
    Mistake("half of the batch twice", batch=halved),
    Mistake("targets of another row", batch=rolled),
    Mistake("a leaf without gradient", gradients=without_the_first),
    Mistake("8 times the gradients", gradients=lambda gradients: jax.tree.map(lambda leaf: leaf * 8, gradients)),
    Mistake("gradients in a short type", gradients=shortened),
)


@dataclass(frozen=True)
class Kind:
    """A way to write a training step."""

    name: str
    build: Callable[[Mistake], Callable[..., Any]]
    """A step with this mistake."""
    arguments: Callable[[], tuple[Any, ...]]
    """What it is called with; the last is the batch."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of `compare`."""
    float64: bool = True
    """Whether it can be computed in float64."""
