"""Text from a trained model, one byte at a time.

The tokens so far are at the start of a buffer of seq_len tokens, so the model compiles once for all prompts and
lengths. When the buffer is full, its last half moves to its start, and generation continues with that as context.
(Positions are learned: moving by a single token would change every position, and with it the whole KV cache.)
"""

import codecs
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from shared.config import MOST, MOST_SEED, check, check_range
from shared.model.decoding import abstract_cache
from shared.model.state import TrainState
from shared.placement.placing import place
from shared.runtime.keys import random_key
from shared.twin import Twin

BEGINNING = b"\n"
"""There is no beginning-of-sequence token; an empty prompt starts after a newline."""


def generate(
    twin: Twin,
    state: TrainState,
    prompt: bytes,
    tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    cached: bool = True,
) -> Iterator[np.ndarray]:
    """Yield `tokens` times the next token of each example of the twin's batch, (B,) int32.

    All examples continue the same prompt (its last seq_len bytes, if it is longer). Random keys depend on the example
    and the number of the token only, so a text does not depend on the other examples or on the devices. temperature:
    divides the logits; 0 takes the likeliest token. top_k: sample from the k likeliest; 0 is all. cached: decode only
    the new token at each step, with a KV cache; else run the whole buffer. Raises ValueError for values out of range.
    """
    config = twin.plan.config
    check_choice(tokens, temperature, top_k, seed)
    window = config.model.seq_len
    given = np.frombuffer((prompt or BEGINNING)[-window:], np.uint8)
    check(
        int(max(given)) < config.model.vocabulary,
        f"the prompt has the byte {max(given)}, but the model's vocabulary is {config.model.vocabulary}",
    )
    buffer = np.zeros((config.batch, window), np.int32)
    buffer[:, : given.size] = given
    length, new = given.size, given.size  # tokens in the buffer, and how many of its last are not in the cache
    step = next_tokens(twin, cached)
    cache = empty_cache(twin) if cached else None
    where = twin.plan.layout.batch.rows if cached else twin.plan.layout.batch.tokens
    choice = np.float32(temperature), np.int32(top_k), np.uint32(seed)
    for number in range(tokens):
        single = cached and new == 1
        seen = buffer[:, length - 1 : length] if single else buffer
        placed = place(twin.plan.layout, seen.copy(), where)
        start = length - 1 if single else 0
        sampled, cache = step(state, cache, placed, np.int32(start), np.int32(length - 1 - start), number, *choice)
        sampled = np.asarray(sampled)
        yield sampled
        new = 1
        if length == window:
            length = window // 2
            buffer[:, :length] = buffer[:, window - length :]
            new = length + 1
        buffer[:, length] = sampled
        length += 1


def check_choice(tokens: int, temperature: float, top_k: int, seed: int) -> None:
    """Raise ValueError for the first value that is out of range."""
    check_range("tokens", tokens, 1, MOST)
    if temperature != 0:  # the likeliest token
        check_range("temperature", temperature, 1e-3, 1e3)
    check_range("top_k", top_k, 0, MOST)
    check_range("seed", seed, 0, MOST_SEED)


@functools.lru_cache(maxsize=8)
def next_tokens(twin: Twin, cached: bool) -> Callable[..., Any]:
    """Compile the model and the sampling as one program.

    (state, cache, tokens (B, S), start, which of the S predicts the next, number of the token, temperature, top_k,
    seed) to the next tokens (B,), replicated, and the cache.
    """

    def step(state: TrainState, cache: Any, tokens_BS: Array, start: Array, last: Array, number: Array, *choice: Array):
        if cached:
            logits_BSV, cache = twin.decode(state, cache, tokens_BS, start)
        else:
            logits_BSV = twin.logits(state, tokens_BS)
        return sample_token(logits_BSV[:, last], number, *choice), cache

    layout = twin.plan.layout
    placed = (layout.shardings(P()), layout.shardings(layout.cache) if cached else None)
    return jax.jit(step, donate_argnums=1, out_shardings=placed)


def sample_token(logits_BV: Array, number: Array, temperature: Array, top_k: Array, seed: Array) -> Array:
    """Sample one token for each example, (B,) int32."""
    logits_BV = logits_BV.astype(jnp.float32)
    rows = jnp.arange(logits_BV.shape[0])
    keys_B = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(random_key(seed), row), number))(rows)
    vocabulary = logits_BV.shape[1]
    last = jnp.where(top_k == 0, vocabulary, jnp.minimum(top_k, vocabulary)) - 1
    least_B1 = jnp.sort(logits_BV, axis=-1, descending=True)[:, last][:, None]
    allowed_BV = jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
    warm_BV = allowed_BV / jnp.where(temperature > 0, temperature, 1)
    sampled_B = jnp.where(temperature > 0, jax.vmap(jax.random.categorical)(keys_B, warm_BV), logits_BV.argmax(-1))
    return sampled_B.astype(jnp.int32)


def empty_cache(twin: Twin) -> Any:
    """Return a KV cache of zeros, placed for the twin."""
    layout = twin.plan.layout
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract_cache(twin.plan.config))
    return place(layout, zeros, layout.cache)


class Display:
    """Turns bytes, as they come, into text that is safe to print.

    A character is printed once it is complete; bytes that are not UTF-8 and control characters, which could drive a
    terminal, as `\\xNN`.
    """

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def __call__(self, data: bytes, last: bool = False) -> str:
        text = self.decoder.decode(data, last)
        return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e]", lambda found: escaped(found.group()), text)


def escaped(character: str) -> str:
    """Escape a character as Python does in a string: \\x1b, \\u202e."""
    return character.encode("unicode_escape").decode()
