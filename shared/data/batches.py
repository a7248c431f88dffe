"""Batches of text: a pure function of (seed, step), the same for any number of devices or processes.

An epoch cuts the text into windows that do not overlap and visits them in an order drawn from (seed, epoch). The whole
state of the data is the step number, so there is nothing to checkpoint and no input library is needed. (`grain` does
this for data that does not fit in memory.)
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from shared.config import check


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """One global batch: JAX arrays sharded by the strategy table, or numpy arrays.

    In numpy it may have only the examples that one process needs.
    """

    tokens: Any
    """(B, T) int32."""
    targets: Any
    """(B, T) int32: the next byte of the text at each position."""
    weights: Any
    """(B, T) float32: how much each position counts in the loss; 0 masks it."""
    rows: Any
    """(B,) uint32: each example's index in the global batch, from which its dropout masks are drawn."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Windows of one text.

    text: bytes as (N,) uint8. The last window is padded with masked positions, so that every byte but the first is a
    target once in an epoch. Raises ValueError if the text is shorter than one window, or has fewer windows than a batch
    has examples.
    """

    text: np.ndarray
    window: int
    batch: int
    seed: int = 0

    def __post_init__(self) -> None:
        size = self.text.size
        check(
            size > self.window,
            f"the text has {size} bytes, but a window of {self.window} needs {self.window + 1}; "
            "give a longer text or a smaller --seq-len",
        )
        check(
            self.windows >= self.batch,
            f"the text has {self.windows} windows of {self.window}, too few for a batch of {self.batch}; "
            "give a longer text, a smaller --batch or a smaller --seq-len",
        )

    @property
    def windows(self) -> int:
        """Number of windows in an epoch."""
        return -(-(self.text.size - 1) // self.window)

    @property
    def batches_per_epoch(self) -> int:
        """Full batches in an epoch; windows left over are skipped in this epoch."""
        return self.windows // self.batch

    def __call__(self, step: int, rows: slice = slice(None)) -> Batch:
        """Return the global batch of this step, or some rows of it, copied: JAX on CPU may use its memory in place."""
        epoch, number = divmod(step, self.batches_per_epoch)
        order = epoch_order(self.seed, epoch, self.windows)
        return self.cut(order[number * self.batch : (number + 1) * self.batch], rows)

    def cut(self, windows_B: np.ndarray, rows: slice = slice(None)) -> Batch:
        """Return these windows, by number, as a batch, or some rows of it."""
        positions_BT = windows_B[rows, None] * self.window + np.arange(self.window)
        counted_BT = positions_BT + 1 < self.text.size
        last = self.text.size - 1
        return Batch(
            tokens=self.text[np.minimum(positions_BT, last)].astype(np.int32),
            targets=self.text[np.minimum(positions_BT + 1, last)].astype(np.int32),
            weights=counted_BT.astype(np.float32),
            rows=np.arange(len(windows_B), dtype=np.uint32)[rows],
        )


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, windows: int) -> np.ndarray:
    """Return the order in which an epoch visits its windows: a permutation drawn from (seed, epoch)."""
    order = np.random.default_rng((seed, epoch)).permutation(windows)
    order.flags.writeable = False
    return order


def microbatches(batch: Batch, parts: int) -> Batch:
    """Reshape the batch's examples (B, ...) to (parts, B / parts, ...)."""
    return jax.tree.map(lambda leaf: leaf.reshape(parts, -1, *leaf.shape[1:]), batch)
