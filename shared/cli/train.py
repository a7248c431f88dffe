"""`train`: everything that can be wrong is checked, then a run is begun or gone on with."""

import dataclasses
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import jax
import tyro
from rich.console import Console

from shared.checkpoint.manifest import Manifest, describe_text, flat, misfits, saved_steps
from shared.config import Config, check, validate
from shared.data.batches import Dataset
from shared.data.corpus import CORPORA, read_corpus, read_file, split
from shared.model.state import TrainState
from shared.placement.drawing import draw_placement
from shared.placement.mesh import make_mesh
from shared.placement.strategies import label, summary
from shared.runtime import processes, startup
from shared.runtime.processes import Cluster, StopSignals
from shared.training.loop import Action, evaluate, every, train
from shared.training.profiling import Profile
from shared.training.reporter import Reporter, open_output
from shared.twin import Twin

if TYPE_CHECKING:
    from shared.checkpoint.writer import Writer

PROFILED = 3
"""Steps in a profile, of which two come before: one that compiles and one that does not."""


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
    """Share of the text, from its end, that is kept for validation."""
    eval_every: int = 0
    """Steps between evaluations on the validation text; 0 evaluates at the end only."""
    devices: int | None = None
    """Number of devices, over all processes; by default all there are, or 4 simulated ones on a CPU."""
    cluster: Annotated[Cluster, tyro.conf.arg(name="")] = field(default_factory=Cluster)
    checkpoint_dir: Path | None = None
    """Folder for checkpoints; several processes need one that all of them see."""
    checkpoint_every: int = 100
    """Steps between checkpoints; one is also saved at the end, and when the run is stopped by SIGTERM or Ctrl-C."""
    keep: int = 3
    """How many checkpoints are kept: the newest."""
    resume: bool = False
    """Go on from the newest good checkpoint in --checkpoint-dir, or begin if it holds none yet."""
    metrics: Path | None = None
    """File for lines of JSON: the run's configuration, then one for each step and evaluation."""
    profile: Path | None = None
    """Folder for a trace of a few steps."""
    show_placement: bool = False
    """Draw where batch, parameters and optimizer state live."""


def run_train(build: Callable[..., Twin], program: str, command: TrainCommand) -> int:
    """Train and report; returns the exit code, 0 or 128 + the number of the signal that stopped the run."""
    config, folder = command.config, command.checkpoint_dir
    dataset, validation_text = read_text(command)
    check_flags(command)
    float64 = "float64" in (config.model.dtype, config.model.param_dtype)
    found, devices = startup.start_all(command.cluster, command.devices, float64=float64)
    check_agreement(command, dataset)
    twin = build(config, make_mesh(config.strategy, devices, config.mesh))
    console = Console(highlight=False, soft_wrap=True, quiet=not processes.is_first())
    manifest = Manifest(0, config, describe_text(dataset), f"{program} on {dict(twin.mesh.shape)}", {})
    notes: list[str] = []
    state, done = resumed(command, twin, manifest, notes) if folder else (None, 0)

    with ExitStack() as stack:
        profile = Profile(command.profile, done + 3, done + 2 + PROFILED) if command.profile else None
        writer = stack.enter_context(open_writer(folder, command.keep, manifest)) if folder else None
        kept = command.metrics if processes.is_first() else None
        file = stack.enter_context(open_output(kept, "--metrics", append=command.resume)) if kept else None
        console.print(found.describe())
        console.print(
            f"{program}: {label(config)} over {dict(twin.mesh.shape)}, "
            f"{summary(config)}; "
            f"{dataset.text.size:,} bytes to train on, {dataset.batches_per_epoch} batches an epoch"
        )
        for note in notes:
            console.print(note, markup=False)
        if command.show_placement:
            draw_placement(console, config, twin.plan.layout)
        if done >= config.steps:
            console.print(f"step {done} of {config.steps} is done already; nothing is left to train")
            return 0
        reporter = Reporter(stack, console, file, done + 1, config.steps)
        reporter.write(head(program, command, found, twin, done))
        actions: list[Action] = profile.actions() if profile else []
        if writer:
            actions.append(Action(every(command.checkpoint_every, config.steps), writer.save))
        if validation_text is not None:

            def validate_now(step: int, state: TrainState) -> None:
                loss, windows = evaluate(twin, state, validation_text)
                check(math.isfinite(loss), f"the validation loss is {loss}; try a lower --learning-rate or --clip 1")
                reporter.validation(step, loss, windows)

            actions.append(Action(every(command.eval_every, config.steps), validate_now))
        else:
            console.print("no validation: the part of the text kept for it is no longer than a window")
        signals = stack.enter_context(StopSignals())
        state = train(twin, dataset, reporter, start=state, actions=actions, stop=signals)
        done = int(state.step)
        if writer:
            writer.save(done, state)
            writer.wait()
        if profile:
            console.print(profile.report or "no profile: the run ended before the steps that were to be traced")
    if signals.received:
        saved = ", which is saved; the same command with --resume goes on from there" if writer else ""
        console.print(f"stopped by {signals.received.name} after step {done}{saved}")
        return 128 + signals.received
    return 0


def read_text(command: TrainCommand) -> tuple[Dataset, Any]:
    """The training text cut into batches, and the validation text or None. Raises ValueError for what cannot work."""
    config, model = command.config, command.config.model
    validate(config)
    both = command.data is not None and command.corpus is not None
    check(not both, f"--data {command.data} and --corpus {command.corpus} both name a text; give one of them")
    check(0 <= command.validation < 1, f"validation is {command.validation}; give a share from 0 up to 1")
    text = read_file(command.data) if command.data else read_corpus(command.corpus or CORPORA[0], command.cache_dir)
    training_text, validation_text = split(text, command.validation, model.seq_len)
    dataset = Dataset(training_text, model.seq_len, config.batch, config.seed)
    check(
        int(text.max()) < model.vocabulary,
        f"vocabulary={model.vocabulary} is too small for bytes up to {text.max()}; give 256",
    )
    return dataset, validation_text


def check_flags(command: TrainCommand) -> None:
    """Raise ValueError for flags that cannot work, or not with each other."""
    check(command.eval_every >= 0, f"eval_every is {command.eval_every}; give a number of steps, or 0")
    check(command.checkpoint_every >= 1, f"checkpoint_every is {command.checkpoint_every}; give at least 1 step")
    check(command.keep >= 1, f"keep is {command.keep}; give at least 1 checkpoint")
    folder = command.checkpoint_dir
    check(folder is not None or not command.resume, "--resume needs --checkpoint-dir DIR")
    check(
        folder is None or folder.is_dir() or not folder.exists(),
        f"{folder} is a file; give --checkpoint-dir a folder to write to",
    )
    needed = 2 + PROFILED
    check(
        command.profile is None or command.config.steps >= needed,
        f"steps is {command.config.steps}; --profile needs at least {needed}",
    )


def check_agreement(command: TrainCommand, dataset: Dataset) -> None:
    """Raise ValueError, in all processes, if one was given another run than process 0: they would wait for ever."""
    own = ("config", "cluster", "data", "corpus", "cache_dir", "metrics")
    mine: dict[str, Any] = {**flat(command.config), "training text": describe_text(dataset)}
    mine.update({name: str(value) for name, value in vars(command).items() if name not in own})
    first = processes.from_first(mine)
    differing = [f"{name} ({mine[name]}, in process 0 {first[name]})" for name in mine if mine[name] != first[name]]
    problem = f"processes differ in {'; '.join(differing)}; give all the same" if differing else ""
    problem = processes.first_problem(problem)
    check(not problem, problem)


def resumed(command: TrainCommand, twin: Twin, asked: Manifest, notes: list[str]) -> tuple[TrainState | None, int]:
    """The state to go on from, placed, and its step; None and 0 where there is nothing yet. Adds what to tell to notes.

    Raises ValueError if checkpoints are there and --resume was not given, or if they do not fit or none is good.
    """
    from shared.checkpoint.reader import restore_newest, set_aside

    folder = command.checkpoint_dir
    assert folder is not None
    if not command.resume:
        steps = saved_steps(folder)
        newest = f"{folder} holds checkpoints already, the newest of step {max(steps, default=0)}"
        check(not steps, f"{newest}; give --resume to go on from it, or another --checkpoint-dir")
        return None, 0

    def fits(saved: Manifest) -> None:
        differing = misfits(saved, asked.config, asked.text)
        check(
            not differing,
            f"the checkpoint of step {saved.step} in {folder} does not fit: {'; '.join(differing)}; "
            "give what was saved, or another --checkpoint-dir"
            + (" (--steps is free with --schedule constant only)" if saved.config.steps != asked.config.steps else ""),
        )

    found = restore_newest(folder, twin, notes.append, fits)
    if found is None:
        notes.append(f"no checkpoint in {folder} yet: beginning at step 1")
        return None, 0
    state, saved = found
    set_aside(folder, saved.step)
    notes.append(f"going on from step {saved.step} in {folder}, saved by {saved.program}")
    return state, saved.step


def open_writer(folder: Path, keep: int, manifest: Manifest) -> "Writer":
    """What saves checkpoints. Orbax takes a second to import, which runs without checkpoints need not wait for."""
    from shared.checkpoint.writer import Writer

    return Writer(folder, keep, manifest)


def head(program: str, command: TrainCommand, found: startup.Runtime, twin: Twin, done: int) -> dict[str, Any]:
    """The first line of a metrics file, and of each run that adds to one."""
    return {
        "program": program,
        "from_step": done,
        "config": dataclasses.asdict(command.config),
        "command": {
            name: value
            for name, value in dataclasses.asdict(command).items()
            if name not in ("config", "cluster") and value is not None
        },
        "mesh": dict(twin.mesh.shape),
        "processes": jax.process_count(),
        "device_kinds": sorted({device.device_kind for device in twin.mesh.devices.flat}),
        "platform": found.platform,
        "versions": startup.versions(),
    }
