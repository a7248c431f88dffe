"""Names for the leaves of a pytree."""

from collections.abc import Callable
from typing import Any

import jax


def leaf_name(path: tuple[Any, ...]) -> str:
    """A leaf's path as words joined by dots, as in `blocks.attention.key.bias`; a key with a dot of its own is quoted.

    The `.value` that NNX variables add is left out, so that an `nnx.State` and the plain dictionary of the same
    parameters have the same names. The name of a tree that is a leaf itself is `result`.
    """
    if path and getattr(path[-1], "name", None) == "value":
        path = path[:-1]
    words = [jax.tree_util.keystr((key,), simple=True, separator=".") for key in path]
    return ".".join(repr(word) if "." in word else word for word in words) or "result"


def named_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """The leaves by name, in the tree's order. Paths that read alike ({1: x, "1": y}) are written as Python does."""
    paths = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    names = [leaf_name(path) for path, _ in paths]
    alike = {name for name in names if names.count(name) > 1} if len({*names}) < len(names) else set()
    named: dict[str, Any] = {}
    for name, (path, leaf) in zip(names, paths, strict=True):
        unique = jax.tree_util.keystr(path) if name in alike else name
        while unique in named:  # a custom container may give two children one key
            unique += "'"
        named[unique] = leaf
    return named


def group_of(name: str) -> str:
    """The part of a leaf's name that hints go by: its first word, and the second too where the first is a number.

    So a step that returns `(state, metrics)` has the groups `0.params`, `0.opt_state`, `1.loss`, ...
    """
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if rest and (first.isdigit() or first == "after") else first
