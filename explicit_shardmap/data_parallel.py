"""Data parallelism by hand: each device has its own rows of the batch, and all parameters and optimizer state.

The strategy table (shared/placement.py) says what each device holds; here is what they send each other.
"""

from typing import Any

from jax import lax

from shared.placement import Layout


def average_gradients(layout: Layout, gradients: Any) -> Any:
    """Average the devices' local gradients: one all-reduce.

    The gradients must be local ones, taken with respect to parameters that `lax.pcast` made varying. Of replicated
    parameters, `jax.grad` has summed them over the devices already, and a `pmean` of the equal sums changes nothing:
    the result is too large by the number of devices (tests/test_wrong_forms.py has the whole table).
    """
    return lax.pmean(gradients, layout.batch_axes)
