"""The step of generation by placement: logits of a few further tokens, with the KV cache of those before.

Rows of the cache live where rows of the batch do, and heads where `tensor` shards them. The sequence is not sharded: a
step of generation has too few tokens for that.
"""

from jax import Array

from shared.model.decoding import Cache
from shared.model.state import TrainState
from shared.twin import Plan


def decode(plan: Plan, state: TrainState, cache: Cache, tokens: Array, start: Array) -> tuple[Array, Cache]:
    """Logits of further tokens at the positions from `start`, and the cache with their keys and values in it."""
    return plan.decode(state.params, cache, tokens, start)
