"""Data parallelism by hand: each device has its own rows of the batch, and all parameters and optimizer state.

The strategy table (shared/placement/strategies.py) says what each device holds; here is what they send each other.
"""

import math
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from shared.placement.buckets import group_by, join, split
from shared.placement.specs import sharded_axes
from shared.twin import Plan


def average(plan: Plan, local: Any) -> Any:
    """Average what the devices have, ((loss, gradients), tokens): one all-reduce for each sort of leaves.

    Gradients must be local ones, taken with respect to parameters that `lax.pcast` made varying. Of replicated
    parameters, `jax.grad` has summed them over the devices already, and a `pmean` of the equal sums changes nothing:
    the result is too large by the number of devices (tests/twins/test_wrong_forms.py has the whole table).

    A leaf is averaged over exactly the axes on which it is whole. The mean over the devices that split the batch needs
    a factor where that is not the same: fsdp's leaves arrive summed over its axis (the transpose of a gather is a sum),
    so the 1/n is missing; and where `tensor` splits the residual stream, its devices hold parts of a sum.

    Between processes each array of an all-reduce is a message of its own, so small ones are joined into buckets first
    (as PyTorch's DistributedDataParallel does; Li et al. 2020, section 3.2.3); `bucket_bytes=0` is the plain form.
    """
    layout, size = plan.layout, plan.config.bucket_bytes
    specs = ((P(), layout.state.params), P())
    axes = ((layout.batch_axes, layout.reduce_axes), layout.batch_axes)
    leaves, structure = jax.tree.flatten(local)
    # Leaves of one sort may share a bucket: they are averaged over the same axes, and split over the same.
    sorts = zip(structure.flatten_up_to(axes), map(sharded_axes, jax.tree.leaves(specs)), strict=True)
    for (over, _), numbers in group_by(sorts).items():
        averaged = [leaves[number] for number in numbers]
        if over and size == 0:
            averaged = lax.pmean(averaged, over)
        elif over:
            averaged = split(lax.pmean(join(averaged, size), over), like=averaged, size=size)
        factor = math.prod(layout.mesh.shape[axis] for axis in over) / layout.token_devices
        for number, leaf in zip(numbers, averaged, strict=True):
            leaves[number] = leaf if factor == 1 else leaf * factor
    return jax.tree.unflatten(structure, leaves)
