"""The arguments of a function, copied for every call; NNX modules among them, which a function may change in place."""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from twinstep.equivalence.leaves import Named, named_results
from twinstep.tree import group_of, leaf_name

Function = Callable[..., Any]


@dataclass(frozen=True)
class Arguments:
    """Positional and keyword arguments as a flat list of leaves, of which modules are taken apart."""

    leaves: Sequence[Any]
    assemble: Callable[[Sequence[Any]], tuple[tuple, dict, list]]
    """Leaves to (args, kwargs, modules): new containers and new modules, with what was shared shared again."""
    paths: Sequence[tuple[Any, ...]]
    """Of each module: where it stands in (args, kwargs)."""

    def replaced(self, change: Callable[[Any], Any]) -> "Arguments":
        """With each leaf that is a floating array changed."""
        return Arguments(
            [change(leaf) if is_floating(leaf) else leaf for leaf in self.leaves], self.assemble, self.paths
        )

    def dtypes(self) -> list[np.dtype]:
        """The types of the floating arrays."""
        return list(dict.fromkeys(leaf.dtype for leaf in self.leaves if is_floating(leaf)))


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def is_floating(leaf: Any) -> bool:
    """Whether the leaf is an array of floating-point numbers; a Python float is no array: it may be static."""
    return is_array(leaf) and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def is_module(node: Any) -> bool:
    """Whether the node is an NNX module, optimizer or variable. Flax is not imported for this: it must be already."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, (getattr(nnx, "Pytree", nnx.Module), nnx.Module, nnx.Variable))


def take_apart(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """The arguments as leaves. A module or variable that is reached twice stays one."""
    paths, structure = jax.tree_util.tree_flatten_with_path((tuple(args), dict(kwargs)), is_leaf=is_module)
    flat = [leaf for _, leaf in paths]
    places = [place for place, leaf in enumerate(flat) if is_module(leaf)]
    if not places:

        def assemble(leaves: Sequence[Any]) -> tuple[tuple, dict, list]:
            return *jax.tree.unflatten(structure, leaves), []

        return Arguments(flat, assemble, [])
    nnx = sys.modules["flax.nnx"]
    definition, state = nnx.split(tuple(flat[place] for place in places))
    inner, inside = jax.tree.flatten(state)
    others = [leaf for leaf in flat if not is_module(leaf)]

    def assemble_modules(leaves: Sequence[Any]) -> tuple[tuple, dict, list]:
        modules = list(nnx.merge(definition, jax.tree.unflatten(inside, leaves[len(others) :])))
        rest, ready = iter(leaves[: len(others)]), iter(modules)
        nodes = [next(ready) if place in places else next(rest) for place in range(len(flat))]
        return *jax.tree.unflatten(structure, nodes), modules

    return Arguments([*others, *inner], assemble_modules, [paths[place][0] for place in places])


def fresh(leaf: Any) -> Any:
    """A copy of an array, in the same place."""
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else np.copy(leaf)[()] if is_array(leaf) else leaf


def call(function: Function, arguments: Arguments, names: Sequence[str] = ()) -> Named:
    """What the function returns of copies of the arguments, and the modules' state afterwards, leaves by name.

    names: of the modules (`module_names`). Functions may donate or change what they are given.
    """
    args, kwargs, modules = arguments.assemble([fresh(leaf) for leaf in arguments.leaves])
    result = jax.block_until_ready(function(*args, **kwargs))
    return Named({**named_results(plain_modules(result)), **states(modules, names)})


def plain_modules(result: Any) -> Any:
    """The result with the state of an NNX module in the module's place."""
    return jax.tree.map(
        lambda node: (
            sys.modules["flax.nnx"].state(node)
            if is_module(node) and not isinstance(node, sys.modules["flax.nnx"].Variable)
            else node
        ),
        result,
        is_leaf=is_module,
    )


def states(modules: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    """The leaves of the modules' states, as `after.model.kernel`."""
    found: dict[str, Any] = {}
    for module, name in zip(modules, names, strict=True):
        state = sys.modules["flax.nnx"].state((module,))
        for leaf, value in named_results(state).items():
            found[f"after.{name}{leaf.removeprefix('0')}"] = value
    return found


def module_names(function: Function, arguments: Arguments) -> list[str]:
    """A name for each module: the function's own name for its parameter, if that can be found, and the path inside."""
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        parameters = []
    names = []
    for keyword, *path in arguments.paths:
        words = leaf_name(tuple(path)).split(".")
        if getattr(keyword, "idx", 0) == 0 and int(words[0]) < len(parameters):
            words[0] = parameters[int(words[0])]
        names.append(".".join(words))
    return names


def unchanged(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether no module differs from what it was."""
    return all(
        is_array(value)
        and is_array(before.get(name))
        and np.array_equal(raw(value), raw(before[name]), equal_nan=False)
        for name, value in after.items()
        if group_of(name).startswith("after.")
    )


def raw(leaf: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
