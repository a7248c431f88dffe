"""Data parallelism by hand: each device has its own rows of the batch, and all parameters and optimizer state.

The strategy table (shared/placement/strategies.py) says what each device holds; here is what they send each other.
"""

from typing import Any

from jax import Array, lax
from jax.sharding import PartitionSpec as P

from shared.placement.buckets import in_buckets
from shared.twin import Plan


def all_reduce(plan: Plan, sums: Any) -> Any:
    """Sum over the devices what each has for its own tokens, ((loss, gradients), tokens).

    A gradient is summed over exactly the axes over which tokens are sharded and its parameter is replicated. (Over
    `fsdp`, which shards both, the transpose of the gather has summed it already.) It must be a local gradient, with
    respect to a parameter that `lax.pcast` made varying; `jax.grad` of a replicated one is summed over the devices
    already, and summing it again makes it too large by their number (tests/twins/test_wrong_forms.py has all forms).

    Between processes each array of an all-reduce is a message of its own, so small ones are joined into buckets first
    (as PyTorch's DistributedDataParallel does; Li et al. 2020, section 3.2.3); `bucket_bytes=0` is the plain form.
    """

    def reduced(arrays: list[Array], axes: tuple[str, ...]) -> list[Array]:
        return lax.psum(arrays, axes)

    axes = ((plan.layout.batch_axes, plan.layout.reduce_axes), plan.layout.batch_axes)
    specs = ((P(), plan.layout.state.params), P())
    return in_buckets(reduced, sums, axes, specs, plan.config.bucket_bytes)
