"""Data parallelism by placement: each device has its own rows of the batch, and all parameters and optimizer state.

The strategy table (shared/placement/strategies.py) gives the shardings, and these are the whole program: nothing here
communicates.
"""

from typing import Any

from shared.twin import Plan


def all_reduce(plan: Plan, sums: Any) -> Any:
    """Return the sums, ((loss, gradients), tokens), as they are: taken over global arrays, they are global sums.

    Each device computes the part of its own rows. Since gradients must be sharded like the parameters, which are
    replicated, XLA inserts one all-reduce.
    """
    return sums
