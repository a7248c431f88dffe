"""Names for the leaves of a pytree."""

from typing import Any

import jax


def leaf_name(path: tuple[Any, ...]) -> str:
    """A leaf's path as words joined by dots, as in `blocks.attention.key.bias`.

    The `.value` that NNX variables add is left out, so that an `nnx.State` and the plain dictionary of the same
    parameters have the same names.
    """
    if path and getattr(path[-1], "name", None) == "value":
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator=".")


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves by name, in the tree's order."""
    return {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
