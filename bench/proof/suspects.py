"""Known mistakes in a step over several devices, and what a step that makes one would return.

Every one is computed with the single-device step, on a batch or from results that have gone wrong in the same way; so a
hint that names one of them is a finding. The proof tries them on whatever differs from the truth.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from shared.config import Config
from shared.data.batches import Batch
from shared.model.state import TrainState
from shared.model.transformer import Seams
from twinstep.equivalence.hints import Suspect
from twinstep.tree import leaf_name

Results = dict[str, Any]


def suspects(
    config: Config,
    state: TrainState,
    batch: Batch,
    devices: int,
    alone: Callable[[Batch], Results],
    before: Batch,
) -> Iterator[Suspect]:
    """The mistakes that can be made with this batch, sharded by rows over so many devices.

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
        "clipping by the norm of each device's own gradients",
        lambda: updated(state, clipped(config, alone(batch)["gradients"], by=own(0)["gradients"])),
        copies=True,
    )
    yield Suspect(
        "reducing nothing: each device keeps what its own rows give",
        lambda: with_gradients(config, state, own(0), 1),
        copies=True,
    )


def context_suspects(batch: Batch, devices: int, alone: Callable[..., Results]) -> Iterator[Suspect]:
    """The mistakes that can be made with sequences that are sharded over so many devices."""
    window = batch.tokens.shape[1]
    size = window // devices
    if devices == 1 or size * devices != window:
        return
    device = np.arange(window) // size
    causal = np.tri(window, dtype=bool)
    own = device[:, None] == device[None, :]

    def attending(times: np.ndarray) -> Callable[[], Results]:
        """Attention in which a query meets each key so many times."""
        return lambda: alone(batch, Seams(attention=functools.partial(counted_attention, jnp.asarray(times))))

    yield Suspect(
        "positions that begin again on each device",
        lambda: alone(batch, Seams(positions=lambda count: jnp.arange(count) % size)),
    )
    yield Suspect(
        "attention without each device's place in the sequence: it sees blocks that are in the future",
        attending(np.where(own, causal, True)),
    )
    yield Suspect("attention within each device's own block: keys and values never arrive", attending(own & causal))
    yield Suspect(
        "a stale key and value block: the ring does not turn, and each device meets its own again and again",
        attending(own * (causal + device[:, None])),
    )
    yield Suspect(
        "targets shifted within each device's part of the sequence, where the next token is another device's",
        lambda: alone(
            dataclasses.replace(
                batch, targets=np.roll(batch.tokens.reshape(-1, devices, size), -1, 2).reshape(batch.tokens.shape)
            )
        ),
    )


def tensor_suspects(batch: Batch, devices: int, alone: Callable[..., Results]) -> Iterator[Suspect]:
    """The mistakes that can be made with matmuls that are sharded over so many devices."""
    if devices == 1:
        return

    def bias_too_often() -> Results:
        """A bias that counts n times is a bias of n times the size, whose gradient is n times as large."""
        results = alone(batch, change=lambda params: scaled_bias(params, devices))
        changed = scaled_bias(results["gradients"], devices)
        return {"loss": results["loss"], "logits": results["logits"], "gradients": changed}

    yield Suspect(
        f"adding the feed-forward bias on each of {devices} devices, and then the parts of the sum", bias_too_often
    )


def scaled_bias(params: Any, factor: int) -> Any:
    """Parameters, or gradients, with the second feed-forward bias so many times as large."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * factor if leaf_name(path).endswith("contract.bias") else leaf, params
    )


def counted_attention(times_TT: Array, query_BTHK: Array, key_BTHK: Array, value_BTHK: Array, **unused: Any) -> Array:
    """Softmax attention in which each query meets each key so many times. Returns (B, T, H, K)."""
    scores_BHTT = jnp.einsum("bqhk,bshk->bhqs", query_BTHK, key_BTHK) * query_BTHK.shape[-1] ** -0.5
    scores_BHTT = jnp.where(times_TT > 0, scores_BHTT + jnp.log(jnp.maximum(times_TT, 1)), -jnp.inf)
    return jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores_BHTT).astype(value_BTHK.dtype), value_BTHK)


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
