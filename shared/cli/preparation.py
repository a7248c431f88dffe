"""The flags of `train`, and everything that is checked and restored before a run trains."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from shared.checkpoint.manifest import Manifest, flat, misfits, saved_steps, text_hash
from shared.config import MOST, Config, check, check_range, validate
from shared.data.batches import Dataset
from shared.data.corpus import CORPORA, hold_out_validation, read_corpus, read_file
from shared.model.state import TrainState
from shared.placement.strategies import read_degrees
from shared.runtime import processes
from shared.runtime.processes import Cluster
from shared.training.profiling import PROFILED, WARM_UP
from shared.twin import Twin


@dataclass(frozen=True)
class TrainCommand:
    """Train the transformer on a text, and print loss and speed as it goes."""

    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)
    data: Path | None = None
    """Text file to train on, read as bytes."""
    corpus: str | None = None
    """Named text to train on: python-docs (the default) or tiny-shakespeare."""
    cache_dir: Path | None = None
    """Where downloaded texts are kept; by default the user's cache directory."""
    validation: float = 0.1
    """Share of the text, from its end, that is held out for validation."""
    eval_every: int = 0
    """Steps between evaluations on the validation text; 0 evaluates at the end only."""
    devices: int | None = None
    """Number of devices, over all processes; by default as many as --mesh says, all there are, or 4 simulated ones."""
    cluster: Annotated[Cluster, tyro.conf.arg(name="")] = field(default_factory=Cluster)
    checkpoint_dir: Path | None = None
    """Folder for checkpoints; with several processes, one that all of them see."""
    checkpoint_every: int = 100
    """Steps between checkpoints; one is also saved at the end, and when the run is stopped by SIGTERM or Ctrl-C."""
    keep: int = 3
    """How many checkpoints to keep: the newest."""
    resume: bool = False
    """Resume from the newest good checkpoint in --checkpoint-dir, or start if it holds none yet."""
    metrics: Path | None = None
    """File for lines of JSON: the run's configuration, then one for each step and evaluation."""
    profile: Path | None = None
    """Folder for a trace of a few steps."""
    show_placement: bool = False
    """Draw how batch, parameters and optimizer state are sharded."""


@dataclass(frozen=True)
class Text:
    """The text of a run, cut into what it is trained on and what it is validated on."""

    whole: np.ndarray
    """Bytes, (N,) uint8."""
    training: Dataset
    validation: np.ndarray | None
    """None: too short to validate on."""


def read_text(command: TrainCommand) -> Text:
    """Read and cut the text. Raises ValueError for a configuration that cannot work with it, or not at all."""
    config, model = command.config, command.config.model
    validate(config)
    both = command.data is not None and command.corpus is not None
    check(not both, f"--data {command.data} and --corpus {command.corpus} both name a text; give one of them")
    check(0 <= command.validation < 1, f"validation is {command.validation}; give a share from 0 up to 1")
    text = read_file(command.data) if command.data else read_corpus(command.corpus or CORPORA[0], command.cache_dir)
    training, validation = hold_out_validation(text, command.validation, model.seq_len)
    dataset = Dataset(training, model.seq_len, config.batch, config.seed)
    check(
        int(text.max()) < model.vocabulary,
        f"vocabulary={model.vocabulary} is too small for bytes up to {text.max()}; give 256",
    )
    return Text(text, dataset, validation)


def check_flags(command: TrainCommand) -> None:
    """Raise ValueError for flags that cannot work, or not with each other."""
    check_range("eval_every", command.eval_every, 0, MOST)
    check_range("checkpoint_every", command.checkpoint_every, 1, MOST)
    check_range("keep", command.keep, 1, MOST)
    folder = command.checkpoint_dir
    check(folder is not None or not command.resume, "--resume needs --checkpoint-dir DIR")
    check(
        folder is None or folder.is_dir() or not folder.exists(),
        f"{folder} is a file; give --checkpoint-dir a folder to write to",
    )
    needed = WARM_UP + PROFILED
    check(
        command.profile is None or command.config.steps >= needed,
        f"steps is {command.config.steps}; --profile needs at least {needed}",
    )


def requested_devices(config: Config, devices: int | None) -> int | None:
    """Return how many devices a run asks for: with --devices, or else by the degrees of --mesh; None: does not."""
    if devices is None and config.mesh:
        return math.prod(read_degrees(config.mesh).values())
    return devices


def check_agreement(command: TrainCommand, dataset: Dataset) -> None:
    """Raise ValueError, in all processes, if they were not all given the same run: they would wait for one another."""
    own = ("config", "cluster", "data", "corpus", "cache_dir", "metrics")
    here: dict[str, Any] = {**flat(command.config), "training text": text_hash(dataset.text)}
    here.update({name: str(value) for name, value in vars(command).items() if name not in own})
    first = processes.from_first(here)
    differing = [f"{name} ({here[name]}, in process 0 {first[name]})" for name in here if here[name] != first[name]]
    problem = f"processes differ in {'; '.join(differing)}; give all the same" if differing else ""
    problem = processes.first_problem(problem)
    check(not problem, problem)


def resumed(
    folder: Path, resume: bool, twin: Twin, requested: Manifest, whole: np.ndarray, note: Callable[[str], None]
) -> tuple[TrainState | None, int]:
    """Return the state to resume from, placed, and its step; None and 0 where there is none yet.

    whole: the text before validation was held out. note: called with lines to print. Raises ValueError if there are
    checkpoints and `resume` is False, or if they do not fit this run or none verifies.
    """
    from shared.checkpoint.reader import restore_newest, set_aside

    if not resume:
        steps = saved_steps(folder)
        newest = f"{folder} holds checkpoints already, the newest of step {max(steps, default=0)}"
        check(not steps, f"{newest}; give --resume to continue from it, or another --checkpoint-dir")
        return None, 0
    found = restore_newest(folder, twin, note, lambda saved: check_fit(folder, saved, requested, whole))
    if found is None:
        note(f"no checkpoint in {folder} yet: starting at step 1")
        return None, 0
    state, saved = found
    set_aside(folder, saved.step)
    note(f"resuming from step {saved.step} in {folder}, saved by {saved.program}")
    return state, saved.step


def check_fit(folder: Path, saved: Manifest, requested: Manifest, whole: np.ndarray) -> None:
    """Raise ValueError if a run of the requested configuration and text cannot resume from this checkpoint."""
    size = saved.text_size
    beginning = size != requested.text_size and size <= whole.size and saved.text == text_hash(whole[:size])
    check(
        not beginning,
        f"the checkpoint of step {saved.step} in {folder} was trained on the first {size} bytes of this text, but this "
        f"run would be on the first {requested.text_size}; give the same --validation, and the text as it was",
    )
    differing = misfits(saved, requested.config, requested.text)
    steps = (
        " (--steps is free with --schedule constant)" if any(name.startswith("steps ") for name in differing) else ""
    )
    check(
        not differing,
        f"the checkpoint of step {saved.step} in {folder} does not fit: {'; '.join(differing)}; "
        f"give what was saved, or another --checkpoint-dir{steps}",
    )
