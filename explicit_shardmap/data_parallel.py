"""Data parallelism by hand: each device has its own rows of the batch, and all parameters and optimizer state.

The strategy table (shared/placement.py) says what each device holds; here is what they send each other.
"""

from typing import Any

from jax import lax

from shared.buckets import join, split
from shared.twin import Plan


def average(plan: Plan, local: Any) -> Any:
    """Average what the devices have, gradients and all: one all-reduce.

    Gradients must be local ones, taken with respect to parameters that `lax.pcast` made varying. Of replicated
    parameters, `jax.grad` has summed them over the devices already, and a `pmean` of the equal sums changes nothing:
    the result is too large by the number of devices (tests/test_wrong_forms.py has the whole table).

    Between processes each array of an all-reduce is a message of its own, so small ones are joined into buckets first
    (as PyTorch's DistributedDataParallel does; Li et al. 2020, section 3.2.3); `bucket_bytes=0` is the plain form.
    """
    axes, size = plan.layout.batch_axes, plan.config.bucket_bytes
    if size == 0:
        return lax.pmean(local, axes)
    return split(lax.pmean(join(local, size), axes), like=local, size=size)
