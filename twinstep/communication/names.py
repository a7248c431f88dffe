"""What an operation's metadata says: the scopes and the primitive in its name, and the line of source it comes from."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from twinstep.communication.entries import PRIMITIVES

CALLS = ("jit", "pjit", "pmap")
"""Wrappers in an operation's name around the name of a function; those of transformations have scopes inside."""
STRUCTURE = re.compile(
    r"while|body|cond|scan|branch_\d+_fun|eval_jaxpr|closed_call|core_call|checkpoint|remat2?|rematted_computation|shard_map|"
    r"custom_jvp_call|custom_vjp_call|custom_lin|run_scoped"
)
"""Parts of names that JAX makes of its own control flow."""


def split(text: str, separator: str) -> list[str]:
    """The parts between separators outside of parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == separator and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def paths(name: str) -> Iterator[list[str]]:
    """The parts of an operation's name: one list, or one for each of several operations that XLA has merged.

    JAX writes `jit(step)/transpose(jvp(scope))/while/body/primitive`; XLA joins names as `a/primitive;b/primitive`,
    and those with a common beginning as `jit(step)/(a/primitive:b/primitive)`.
    """
    for alternative in split(name, ";"):
        *before, last = split(alternative, "/")
        group = next((n for n, part in enumerate([*before, last]) if part.startswith("(")), None)
        if group is None:
            yield [*before, last]
            continue
        parts = [*before, last]
        for merged in split(parts[group][1:].removesuffix(")"), ":"):
            for path in paths(merged):
                yield [*parts[:group], *path, *parts[group + 1 :]]


def written_by_name(name: str) -> bool:
    """Whether all that is merged into an operation are `lax` collectives: JAX ends their names with the primitive's."""
    return all(path[-1] in PRIMITIVES for path in paths(name))


def scopes(part: str) -> Iterator[str]:
    """The named scopes in one part of a name: `transpose(jvp(scope))` has one, `jit(function)` none."""
    wrapper, bracket, inner = part.partition("(")
    if bracket:
        if wrapper not in CALLS:
            for piece in split(inner.removesuffix(")"), "/"):
                yield from scopes(piece)
    elif part.replace(".", "_").isidentifier() and not STRUCTURE.fullmatch(part):  # jnp.einsum names its formula
        yield part


def scope(name: str) -> str:
    """The `jax.named_scope`s in an operation's name, joined by dots; those of merged operations joined by `+`."""
    found = dict.fromkeys(".".join(s for part in path[:-1] for s in scopes(part)) for path in paths(name))
    return "+".join(entry for entry in found if entry)


def relative(path: Path | str) -> Path:
    """The path from the present folder, if it is inside."""
    return Path(path).relative_to(Path.cwd()) if Path(path).is_relative_to(Path.cwd()) else Path(path)


def source(metadata: Any, index: Any) -> str:
    """file:line of the innermost frame outside installed packages, or the operation's name in the source where there
    is none (empty if it has none either).

    metadata: an `OpMetadata`. index: the module's `StackFrameIndexProto`, whose numbers begin with 1.
    """
    number = metadata.stack_frame_id
    while number:
        frame = index.stack_frames[number - 1]
        location = index.file_locations[frame.file_location_id - 1]
        if not installed(index.file_names[location.file_name_id - 1]):
            return f"{relative(index.file_names[location.file_name_id - 1])}:{location.line}"
        number = frame.parent_frame_id
    if metadata.source_file and not installed(metadata.source_file):
        return f"{relative(metadata.source_file)}:{metadata.source_line}"
    return metadata.op_name


def installed(file: str) -> bool:
    """Whether the file belongs to an installed package or to Python."""
    return "site-packages" in Path(file).parts or Path(file).is_relative_to(sys.prefix)
