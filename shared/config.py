"""Every size and choice of a run, as frozen dataclasses, which are also the flags of the command line."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import tyro

DType = Literal["float32", "bfloat16", "float64"]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the transformer. Tokens are bytes, so the vocabulary is 256 unless a test wants it smaller."""

    layers: int = 4
    """Number of transformer blocks."""
    d_model: Annotated[int, tyro.conf.arg(aliases=["--width"])] = 128
    """Size of the residual stream."""
    heads: int = 4
    """Attention heads; must divide d_model."""
    d_ff: Annotated[int, tyro.conf.arg(aliases=["--hidden"])] = 512
    """Hidden size of the feed-forward layer."""
    seq_len: Annotated[int, tyro.conf.arg(aliases=["--window"])] = 128
    """Tokens in one example, and the number of learned positions."""
    vocabulary: int = 256
    """Number of token values."""
    dropout: float = 0.0
    """Share of the activations dropped after the embedding and after each residual branch."""
    remat: bool = True
    """Recompute each block's activations in the backward pass instead of keeping them."""
    unroll: int = 4
    """Blocks unrolled per iteration of the loop over layers. A deep model compiles in the time of this many blocks; a
    model with no more layers has no loop, and XLA can merge the reductions of all its gradients into one."""
    dtype: DType = "float32"
    """Type of activations."""
    param_dtype: DType = "float32"
    """Type of parameters, gradients and optimizer state."""


@dataclass(frozen=True)
class OptimizerConfig:
    """How gradients become an update: clip by global norm, then AdamW or SGD at a scheduled learning rate."""

    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Update rule. SGD has no momentum: the update is the scaled gradient, which is what a proof needs."""
    learning_rate: float = 3e-3
    """Highest learning rate of the schedule."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Shape after the warm-up: cosine down to a tenth over the run, or constant."""
    warmup: int = 20
    """Steps over which the learning rate rises linearly from near 0."""
    clip: float = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it. 0 turns clipping off."""
    weight_decay: float = 0.1
    """AdamW's decay of weight matrices (not of biases, norms or embeddings)."""


@dataclass(frozen=True)
class Config:
    """One run: model, optimizer, and the numbers that the step itself needs."""

    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    batch: int = 16
    """Examples in one global batch, over all devices."""
    steps: int = 200
    """Training steps; the learning-rate schedule ends with them."""
    seed: int = 0
    """Seed of the initial parameters, the data order and the dropout masks."""
    strategy: str = "data_parallel"
    """Name in the strategy table (shared/placement/strategies.py)."""
    mesh: str = ""
    """Mesh axes and degrees in place of the strategy's own, as in data=2,tensor=4; of data, fsdp, context, tensor."""
    microbatches: int = 1
    """Parts of a batch that go through the model one after the other; their gradients are summed."""
    bucket_bytes: int = 4 * 2**20
    """The explicit twin concatenates gradients into buckets of about this size before it reduces them; 0 reduces each
    separately."""


def without_placement(config: Config) -> Config:
    """The same computation on one device: with defaults for the fields that say how a step is spread over devices."""
    return replace(config, strategy="data_parallel", mesh="", microbatches=1, bucket_bytes=Config.bucket_bytes)


class InputError(ValueError):
    """A value that the user gave cannot work. Command lines print its one line and end with exit code 2."""


def check(condition: bool, message: str) -> None:
    """Raise InputError(message) unless the condition holds. The message names the value and the remedy."""
    if not condition:
        raise InputError(message)


MOST = 10**9
"""Largest size or count; steps, tokens and ids are int32."""

MOST_SEED = 2**32 - 1

MOST_DEVICES = 10**6


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raise ValueError, which states the range, unless low <= value <= high; nan is never in range."""
    check(low <= value <= high, f"{name} is {value}; give at least {low} and at most {high}")


def validate(config: Config) -> None:
    """Raise ValueError for the first value of a configuration that cannot work on any device.

    Not called on construction: the command line's parser would replace the message with one of its own.
    """
    model, optimizer = config.model, config.optimizer
    for name in ("layers", "d_model", "heads", "d_ff", "seq_len", "unroll"):
        check_range(name, getattr(model, name), 1, MOST)
    check_range("vocabulary", model.vocabulary, 1, 256)  # tokens are bytes
    check(
        model.d_model % model.heads == 0,
        f"heads={model.heads} does not divide d_model={model.d_model}; "
        f"give a d_model that is a multiple of {model.heads}",
    )
    check(0 <= model.dropout < 1, f"dropout is {model.dropout}; give a share from 0 up to, not including, 1")
    check_range("learning_rate", optimizer.learning_rate, 1e-30, 1e30)
    check_range("warmup", optimizer.warmup, 0, MOST)
    check_range("clip", optimizer.clip, 0, 1e30)
    check_range("weight_decay", optimizer.weight_decay, 0, 1e30)
    check_range("bucket_bytes", config.bucket_bytes, 0, 2**40)
    check_range("batch", config.batch, 1, MOST)
    check_range("microbatches", config.microbatches, 1, MOST)
    check_range("steps", config.steps, 1, MOST)
    check_range("seed", config.seed, 0, MOST_SEED)
