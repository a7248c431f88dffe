"""How much memory a compiled step takes on each device, as its compiler planned it."""

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    arguments: int
    """State and batch."""
    temporary: int
    """Activations, gathered parameters, gradients, buffers of collectives: what the step needs besides."""
    peak: int
    """The most that is held at once: arguments, results that take no argument's place, and temporaries."""


def memory(compiled: jax.stages.Compiled) -> Memory:
    """The memory of a compiled program. Raises ValueError where the backend does not tell.

    The peak is the sum of its parts: what a backend reports as its peak leaves out more or less in different versions.
    """
    found = compiled.memory_analysis()
    if found is None:
        raise ValueError("this backend does not tell how much memory a program takes")
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return Memory(
        arguments=found.argument_size_in_bytes,
        temporary=found.temp_size_in_bytes,
        peak=found.argument_size_in_bytes + results + found.temp_size_in_bytes,
    )
