"""`train`: prepare a run, train, and finish it."""

import dataclasses
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import jax
from rich.console import Console

from shared.checkpoint.lock import locked
from shared.checkpoint.manifest import Manifest, text_hash
from shared.cli.preparation import (
    Text,
    TrainCommand,
    check_agreement,
    check_flags,
    read_text,
    requested_devices,
    resumed,
)
from shared.config import check
from shared.model.state import TrainState
from shared.placement.drawing import draw_placement
from shared.placement.mesh import make_mesh
from shared.placement.strategies import label, summary
from shared.runtime import processes, startup
from shared.runtime.processes import StopSignals
from shared.training.loop import Action, evaluate, every, train
from shared.training.profiling import Profile
from shared.training.reporter import Reporter, open_output
from shared.twin import Twin

if TYPE_CHECKING:
    from shared.checkpoint.writer import Writer


@dataclass(frozen=True)
class Run:
    """A run that is ready to train."""

    program: str
    command: TrainCommand
    runtime: startup.Runtime
    twin: Twin
    text: Text
    console: Console
    state: TrainState | None
    """None: that of step 0."""
    done: int
    """Steps done before."""
    writer: "Writer | None"
    profile: Profile | None
    metrics: TextIO | None


def run_train(build: Callable[..., Twin], program: str, command: TrainCommand) -> int:
    """Train and report; return the exit code, 0 or 128 + the number of the signal that stopped the run."""
    with ExitStack() as stack:
        run = prepare(build, program, command, stack)
        if run.done >= command.config.steps:
            run.console.print(f"step {run.done} of {command.config.steps} is done already; nothing is left to train")
            return 0
        state, signals = execute(run, stack)
        done = finish(run, state)
    if signals.received:
        saved = ", which is saved; the same command with --resume continues from it" if run.writer else ""
        run.console.print(f"stopped by {signals.received.name} after step {done}{saved}")
        return 128 + signals.received
    return 0


def prepare(build: Callable[..., Twin], program: str, command: TrainCommand, stack: ExitStack) -> Run:
    """Check everything that can be wrong, restore, open all outputs on the stack, and print what will be trained."""
    config, folder = command.config, command.checkpoint_dir
    text = read_text(command)
    check_flags(command)
    float64 = "float64" in (config.model.dtype, config.model.param_dtype)
    wanted = requested_devices(config, command.devices)
    runtime, devices = startup.start_all(command.cluster, wanted, float64=float64)
    check_agreement(command, text.training)
    twin = build(config, make_mesh(config.strategy, devices, config.mesh))
    manifest = Manifest(0, config, text_hash(text.training.text), f"{program} on {dict(twin.mesh.shape)}", {})
    notes: list[str] = []
    state, done, writer = None, 0, None
    if folder:
        stack.enter_context(locked(folder, notes.append))
        state, done = resumed(folder, command.resume, twin, manifest, text.whole, notes.append)
        writer = stack.enter_context(open_writer(folder, command.keep, manifest))
    profile = Profile(command.profile, done) if command.profile else None
    path = command.metrics if processes.is_first() else None
    metrics = stack.enter_context(open_output(path, "--metrics", append=command.resume)) if path else None
    console = Console(highlight=False, soft_wrap=True, quiet=not processes.is_first())
    console.print(runtime.describe())
    console.print(
        f"{program}: {label(config)} over {dict(twin.mesh.shape)}, {summary(config)}; "
        f"{text.training.text.size:,} bytes to train on, {text.training.batches_per_epoch} batches an epoch"
    )
    for note in notes:
        console.print(note, markup=False)
    if command.show_placement:
        draw_placement(console, config, twin.plan.layout)
    return Run(program, command, runtime, twin, text, console, state, done, writer, profile, metrics)


def execute(run: Run, stack: ExitStack) -> tuple[TrainState, StopSignals]:
    """Train to the last step or until a signal; return the last state, and the signals with what was received."""
    command, steps = run.command, run.command.config.steps
    reporter = Reporter(stack, run.console, run.metrics, run.done + 1, steps)
    reporter.write(head(run))
    actions: list[Action] = run.profile.actions() if run.profile else []
    if run.writer:
        actions.append(Action(every(command.checkpoint_every, steps), run.writer.save))
    if run.text.validation is not None:
        actions.append(Action(every(command.eval_every, steps), validation(run, run.text.validation, reporter)))
    else:
        run.console.print("no validation: the part of the text held out for it is no longer than a window")
    signals = stack.enter_context(StopSignals())
    state = train(run.twin, run.text.training, reporter, start=run.state, actions=actions, stop=signals)
    return state, signals


def validation(run: Run, text: Any, reporter: Reporter) -> Callable[[int, TrainState], None]:
    """Return the action that evaluates a state on the validation text."""

    def validate(step: int, state: TrainState) -> None:
        loss, windows = evaluate(run.twin, state, text)
        check(math.isfinite(loss), f"the validation loss is {loss}; try a lower --learning-rate or --clip 1")
        reporter.validation(step, loss, windows)

    return validate


def finish(run: Run, state: TrainState) -> int:
    """Save the last state, report the profile, and return the number of steps done."""
    done = int(state.step)
    if run.writer:
        run.writer.save(done, state)
        run.writer.wait()
    if run.profile:
        run.console.print(run.profile.report or "no profile: the run ended before the steps to trace")
    return done


def open_writer(folder: Path, keep: int, manifest: Manifest) -> "Writer":
    """Return what saves checkpoints. Orbax takes a second to import, which runs without checkpoints do not need."""
    from shared.checkpoint.writer import Writer

    return Writer(folder, keep, manifest)


def head(run: Run) -> dict[str, Any]:
    """Return the first line of a metrics file, and of each run that appends to one."""
    command = run.command
    return {
        "program": run.program,
        "from_step": run.done,
        "config": dataclasses.asdict(command.config),
        "command": {
            name: value
            for name, value in dataclasses.asdict(command).items()
            if name not in ("config", "cluster") and value is not None
        },
        "mesh": dict(run.twin.mesh.shape),
        "processes": jax.process_count(),
        "device_kinds": sorted({device.device_kind for device in run.twin.mesh.devices.flat}),
        "platform": run.runtime.platform,
        "versions": startup.versions(),
    }
