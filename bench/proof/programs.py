"""A step's functions, compiled to be compared: each runs once or twice, so XLA's expensive passes are left out."""

import contextlib
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from shared.config import DType
from shared.data.batches import Batch
from shared.model.state import TrainState
from shared.runtime.compilation import fast_compilation


@dataclass(frozen=True)
class Programs:
    """The functions of a step, compiled for one state and batch, without XLA's expensive passes: they run once."""

    run: Callable[[TrainState, Batch], tuple[Any, Any, Any]]
    """(state, batch) to what loss_and_grads, logits and train_step return; the state may be donated."""

    def observe(self, state: TrainState, batch: Batch, copy: Callable[[TrainState], TrainState]) -> dict[str, Any]:
        """Everything that the step computes, in groups."""
        (loss, gradients, tokens), logits, (after, metrics) = self.run(copy(state), batch)
        found = {
            "loss": {"loss_and_grads": loss, "train_step": metrics["loss"]},
            "metrics": {
                "tokens of loss_and_grads": tokens,
                **{name: value for name, value in metrics.items() if name != "loss"},
            },
            "logits": logits,
            "gradients": gradients,
            "parameters": after.params,
        }
        if loss.dtype == np.float64:  # elsewhere the rounding of the stored parameters would be most of it
            old, new = jax.device_get(state.params), jax.device_get(after.params)
            found["update"] = jax.tree.map(np.subtract, new, old)
        return found


def compiled(step: Any, state: TrainState, batch: Batch) -> Programs:
    """A twin's functions, or the single-device step's, compiled side by side: XLA does not hold Python's lock."""
    lowered = [
        step.loss_and_grads.lower(state, batch),
        step.logits.lower(state, batch.tokens),
        step.train_step.lower(state, batch),
    ]
    options = fast_compilation()
    with ThreadPoolExecutor() as pool:
        gradients, logits, train = pool.map(lambda program: program.compile(compiler_options=options), lowered)

    def run(state: TrainState, batch: Batch) -> tuple[Any, Any, Any]:
        # One after the other: two programs with collectives in flight can deadlock on simulated devices.
        first = jax.block_until_ready(gradients(state, batch))
        second = jax.block_until_ready(logits(state, batch.tokens))
        return first, second, jax.block_until_ready(train(state, batch))

    return Programs(run)


def compiled_together(step: Any, state: TrainState, batch: Batch) -> Programs:
    """The same as one program, which compiles in half the time; nobody runs a step in this form."""

    def everything(state: TrainState, batch: Batch) -> tuple[Any, Any, Any]:
        return step.loss_and_grads(state, batch), step.logits(state, batch.tokens), step.train_step(state, batch)

    program = jax.jit(everything).lower(state, batch).compile(compiler_options=fast_compilation())
    return Programs(lambda state, batch: jax.block_until_ready(program(state, batch)))


@contextlib.contextmanager
def computing_in(dtype: DType) -> Generator[None]:
    """Within it, 64-bit numbers are enabled for float64, and float32 matmuls are done in float32 on any device."""
    with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision("highest"):
        yield
