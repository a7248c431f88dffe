"""Planted bugs of the strategies that split the model or the sequence, as in bench/mutants/data_parallel.py."""

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from flax import nnx
from jax import Array, lax

from bench.mutants.data_parallel import REDUCTION, UNCHECKED
from bench.mutants.planted import Bug, Edit
from shared.model.transformer import Block, matmul


def bias_inside_the_sum() -> AbstractContextManager[Any]:
    """Each device adds the whole bias to its part of the matmul, and then the parts are added up."""

    def feed_forward(self: Block, x_bTD: Array) -> Array:
        self.contract.dot_general = matmul
        return lax.psum(self.contract(nnx.gelu(self.expand(self.before_column_parallel(x_bTD)))), "tensor")

    return mock.patch.object(Block, "feed_forward", feed_forward)


RING = 'block = lax.ppermute(block, "context", [(device, (device + 1) % devices) for device in range(devices)])'

BUGS = (
    Bug(
        "the gather's missing 1/n",
        "explicit",
        edits=(
            # Replicated leaves, loss and count are averaged; what the transpose of a gather has summed is not.
            Edit("data_parallel.py", REDUCTION, "return lax.pmean(arrays, axes)"),
        ),
        strategy="fsdp",
        says="gradients: 2 times the reference .*, on 2 devices along fsdp",
    ),
    Bug(
        "clipping by the norm of a device's own shards",
        "explicit",
        edits=(UNCHECKED, Edit("step.py", "lax.psum(total, axes) if axes else total", "total")),
        strategy="fsdp",
        says=r"metrics.gradient_norm: the copies .*: a reduction over fsdp is missing",
        leaf="metrics.gradient_norm",
    ),
    Bug(
        "an update of the first piece on every device",
        "explicit",
        edits=(Edit("zero.py", 'lax.axis_index("data") * size', '0 * lax.axis_index("data")'),),
        strategy="zero_1",
        says="gradients agree and parameters do not",
        leaf=r"parameters\.\S+",
    ),
    Bug(
        "a bias inside the sum",
        "explicit",
        patch=bias_inside_the_sum,
        strategy="tensor_parallel",
        says="exactly what comes of adding the feed-forward bias on each of 2 devices",
    ),
    Bug(
        "no reduction in the backward pass",
        "explicit",
        edits=(
            UNCHECKED,
            Edit("tensor_parallel.py", 'lambda x: lax.pcast(x, "tensor", to="varying")', "lambda x: x"),
        ),
        strategy="tensor_parallel",
        says="the loss agrees and gradients do not: look at the backward pass",
    ),
    Bug(
        "no reduction after the row-parallel matmuls",
        "explicit",
        edits=(UNCHECKED, Edit("tensor_parallel.py", 'lambda x: lax.psum(x, "tensor")', "lambda x: x")),
        strategy="tensor_parallel",
        says="a reduction over tensor is missing",
    ),
    Bug(
        "positions that begin again",
        "explicit",
        edits=(
            Edit(
                "context_parallel.py",
                "lax.axis_index(axes) * count + jnp.arange(count)",
                "0 * lax.axis_index(axes) + jnp.arange(count)",
            ),
        ),
        strategy="context_parallel",
        says="exactly what comes of positions that begin again on each device",
    ),
    Bug(
        "a missing query offset",
        "explicit",
        edits=(Edit("context_parallel.py", "me >= distance,", "distance >= 0,"),),
        strategy="context_parallel",
        says="exactly what comes of attention without each device's place in the sequence",
    ),
    Bug(
        "a stale key and value block",
        "explicit",
        edits=(Edit("context_parallel.py", RING, "block = block"),),
        strategy="context_parallel",
        says="exactly what comes of a stale key and value block",
    ),
    Bug(
        "a shift within the shard",
        "explicit",
        edits=(
            Edit(
                "step.py",
                "plan.summed_loss(logits, batch.targets, batch.weights)",
                "plan.summed_loss(logits, jax.numpy.roll(batch.tokens, -1, 1), batch.weights)",
            ),
        ),
        strategy="context_parallel",
        says="exactly what comes of targets shifted within each device's part of the sequence",
    ),
)
