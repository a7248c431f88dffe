"""`generate`: text from the newest good checkpoint of a run."""

import dataclasses
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from shared.checkpoint.manifest import read_manifest, saved_steps
from shared.config import Config, InputError, check, check_range
from shared.generation.generate import Display, check_choice, generate
from shared.placement.mesh import make_mesh
from shared.placement.strategies import find_strategy
from shared.runtime import processes, startup
from shared.runtime.processes import Cluster
from shared.twin import Twin


@dataclass(frozen=True)
class GenerateCommand:
    """Continue a prompt with the model of the newest good checkpoint. Only the text goes to standard output."""

    checkpoint_dir: Path
    """Folder that `train --checkpoint-dir` saved to."""
    prompt: str = ""
    """Text to continue; only the last seq_len bytes of a longer one are used."""
    tokens: int = 500
    """Bytes to generate."""
    temperature: float = 1.0
    """Divides the logits: lower is safer text, 0 always takes the likeliest byte."""
    top_k: int = 0
    """Sample only from the k likeliest bytes; 0 samples from all."""
    seed: int = 0
    """Seed of the sampling."""
    samples: int = 1
    """Continuations, side by side on the devices. The first is printed as it is generated, the others after it."""
    no_cache: bool = False
    """Run the whole window through the model for every byte, instead of using a KV cache."""
    devices: int | None = None
    """Number of devices, over all processes; by default all there are, or 1 on a CPU."""
    cluster: Annotated[Cluster, tyro.conf.arg(name="")] = field(default_factory=Cluster)


def run_generate(build: Callable[..., Twin], program: str, command: GenerateCommand) -> int:
    """Print the prompt and its continuations."""
    check_range("samples", command.samples, 1, 10_000)
    check_choice(command.tokens, command.temperature, command.top_k, command.seed)
    from shared.checkpoint.reader import restore_newest

    folder = command.checkpoint_dir
    steps = saved_steps(folder)
    check(bool(steps), f"no checkpoint in {folder}; give a folder that `train` saved to")
    # Generation need not be sharded as training was.
    config = dataclasses.replace(newest_config(folder, steps), mesh="", microbatches=1)
    float64 = "float64" in (config.model.dtype, config.model.param_dtype)
    found, devices = startup.start_all(command.cluster, command.devices, alone=1, float64=float64)
    output = Output(processes.is_first())
    mesh = make_mesh(config.strategy, devices)
    # Examples are sharded, so there is at least one per shard; those beyond --samples are not printed.
    shards = find_strategy(config.strategy).batch_devices(mesh.shape)
    rows = -(-command.samples // shards) * shards
    twin = build(dataclasses.replace(config, batch=rows), mesh)
    restored = restore_newest(folder, twin, output.aside)
    if restored is None:
        raise InputError(f"the checkpoints in {folder} are gone; give a folder that `train` saved to")
    state, manifest = restored

    prompt = os.fsencode(command.prompt)  # the bytes that were typed, whether or not they are UTF-8
    shown = Display()
    output.text(shown(prompt))
    sampled: list[np.ndarray] = []
    begin = time.perf_counter()
    for number, tokens in enumerate(
        generate(
            twin,
            state,
            prompt,
            command.tokens,
            temperature=command.temperature,
            top_k=command.top_k,
            seed=command.seed,
            cached=not command.no_cache,
        )
    ):
        output.text(shown(bytes([tokens[0]])))
        sampled.append(tokens)
        if number == 1:
            begin = time.perf_counter()  # the first two compiled: a whole window, and a single token
    seconds = time.perf_counter() - begin
    output.text(shown(b"", last=True) + "\n")
    for row in range(1, command.samples):
        continuation = bytes(int(tokens[row]) for tokens in sampled)
        output.text(f"---\n{Display()(prompt + continuation, last=True)}\n")
    if command.tokens > 2:
        speed = (command.tokens - 2) / seconds
        output.aside(
            f"step {manifest.step}, {program} on {dict(mesh.shape)} ({found.platform}): "
            f"{speed:,.0f} tokens/s in each of {rows} row{'s' * (rows > 1)}"
        )
    return 0


def newest_config(folder: Path, steps: list[int]) -> Config:
    """Return the configuration of the newest readable step; all steps of a folder have the same model."""
    problems = []
    for step in steps:
        try:
            return read_manifest(folder / str(step)).config
        except InputError as error:
            problems.append(f"step {step}: {error}")
    raise InputError(f"no step in {folder} can be restored ({'; '.join(problems)}); train again")


@dataclass(frozen=True)
class Output:
    """Prints in process 0 only."""

    first: bool

    def text(self, text: str) -> None:
        """Print the text itself, at once."""
        if self.first:
            sys.stdout.write(text)
            sys.stdout.flush()

    def aside(self, line: str) -> None:
        """Print a line about it to standard error."""
        if self.first:
            print(line, file=sys.stderr)
