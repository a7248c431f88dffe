"""Known mistakes in a step over several devices, and what a step that makes one would return.

Every one is computed with the single-device step, on a batch or from results that have gone wrong in the same way; so a
hint that names one of them is a finding. The proof tries them on whatever differs from the truth.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from shared.config import Config
from shared.data import Batch
from shared.diagnosis import Suspect
from shared.state import TrainState

Results = dict[str, Any]


def suspects(
    config: Config,
    state: TrainState,
    batch: Batch,
    devices: int,
    alone: Callable[[Batch], Results],
    before: Batch,
) -> Iterator[Suspect]:
    """The mistakes that can be made with this batch, split by rows over so many devices.

    alone: the single-device step's results for any batch of this size. before: the batch of the step before. The
    optimizer must be SGD at learning rate 1, so that the update is the clipped gradient.
    """
    size = config.batch // devices  # rows of one device
    if size * devices != config.batch:
        return

    def changed(**fields: np.ndarray) -> Callable[[], Results]:
        return lambda: alone(dataclasses.replace(batch, **fields))

    yield Suspect("giving every device the same dropout masks", changed(rows=batch.rows % np.uint32(size)))
    yield Suspect("counting masked tokens as well", changed(weights=np.ones_like(batch.weights)))
    total, counted = batch.weights.size, float(batch.weights.sum())
    yield Suspect(
        "dividing by all tokens, masked ones too", lambda: with_gradients(config, state, alone(batch), counted / total)
    )
    yield Suspect("not clipping", lambda: updated(state, alone(batch)["gradients"]))
    yield Suspect(
        "clipping each leaf by its own norm",
        lambda: updated(state, jax.tree.map(lambda leaf: clipped(config, leaf), alone(batch)["gradients"])),
    )
    if devices == 1:
        return
    yield Suspect(
        "a shift: each device takes the tokens of the next and its own targets",
        changed(tokens=np.roll(batch.tokens, -size, 0)),
    )
    yield Suspect(
        "giving every device the rows of the first",
        lambda: alone(jax.tree.map(lambda leaf: np.concatenate([leaf[:size]] * devices), batch)),
    )
    yield Suspect(
        "giving each device the rows of the next",
        lambda: {"logits": np.roll(alone(batch)["logits"], -size, 0)},
    )
    for device in range(devices):
        rows = slice(device * size, (device + 1) * size)

        def stale(rows: slice = rows) -> Results:
            return alone(
                jax.tree.map(
                    lambda new, old: np.concatenate([new[: rows.start], old[rows], new[rows.stop :]]), batch, before
                )
            )

        yield Suspect(f"a stale shard: device {device} has the rows of the step before", stale)

    def own(device: int) -> Results:
        """What one device has of the batch: the means over its own counted tokens."""
        mine = np.arange(config.batch) // size == device
        return alone(dataclasses.replace(batch, weights=batch.weights * mine[:, None]))

    def mean_of_means() -> Results:
        each = [own(device) for device in range(devices)]
        return with_gradients(config, state, mean(each), 1)

    yield Suspect(
        "averaging the devices' own means, though they count different numbers of tokens (reduce sums and counts)",
        mean_of_means,
    )

    def clipped_before() -> Results:
        """Each device's share of the gradients is clipped by its own norm."""
        shares = batch.weights.reshape(devices, -1).sum(axis=1) * devices / counted
        each = [
            clipped(config, jax.tree.map(lambda leaf, share=share: leaf * share, own(device)["gradients"]))
            for device, share in enumerate(shares)
            if share
        ]
        gradients = jax.tree.map(lambda *leaves: (np.sum(leaves, axis=0) / devices).astype(leaves[0].dtype), *each)
        return {"gradients": gradients, **updated(state, gradients)}

    yield Suspect("clipping on each device before the reduction", clipped_before)
    yield Suspect(
        "clipping by the norm of the first device's own gradients",
        lambda: updated(state, clipped(config, alone(batch)["gradients"], by=own(0)["gradients"])),
    )


def mean(results: list[Results]) -> Results:
    """The mean of loss and gradients."""
    return {
        group: jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *(each[group] for each in results))
        for group in ("loss", "gradients")
    }


def with_gradients(config: Config, state: TrainState, results: Results, factor: float) -> Results:
    """Loss and gradients scaled by a factor, and the update with those gradients."""
    scaled = jax.tree.map(
        lambda leaf: np.asarray(leaf * factor, leaf.dtype), {name: results[name] for name in ("loss", "gradients")}
    )
    return {**scaled, **updated(state, clipped(config, scaled["gradients"]))}


def clipped(config: Config, gradients: Any, by: Any = None) -> Any:
    """Gradients scaled down to the configuration's limit, where their norm (or that of `by`) exceeds it."""
    norm = np.sqrt(
        sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(gradients if by is None else by))
    )
    scale = min(1.0, config.optimizer.clip / norm) if config.optimizer.clip else 1.0
    return jax.tree.map(lambda leaf: np.asarray(leaf * scale, leaf.dtype), gradients)


def updated(state: TrainState, gradients: Any) -> Results:
    """The parameters after SGD with learning rate 1."""
    return {"parameters": jax.tree.map(lambda leaf, gradient: leaf - gradient, state.params, gradients)}
