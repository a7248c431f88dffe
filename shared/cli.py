"""The command line that both twins have: `python -m auto_sharding train ...`, `python -m explicit_shardmap train ...`.

Its flags are the fields of the dataclasses in shared/config.py and of `TrainCommand`.
"""

import dataclasses
import io
import json
import math
import re
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TextIO

import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shared import runtime
from shared.config import Config, InputError, check, validate
from shared.corpus import CORPORA, read_corpus, read_file, split
from shared.data import Dataset
from shared.placement import find_strategy, make_mesh
from shared.training import Record, evaluate, train
from shared.twin import Twin

SIMULATED_DEVICES = 4
"""Devices that a CPU pretends to be unless the user says how many."""


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
    devices: int | None = None
    """Number of devices; by default all there are, or 4 simulated ones on a CPU."""
    metrics: Path | None = None
    """File for one line of JSON per step."""


def main(build: Callable[..., Twin], program: str, arguments: Sequence[str] | None = None) -> None:
    """Run the command line of one twin. Ends with exit code 2 and one line on bad input."""
    with one_line_errors():
        run_training(build, program, parse({"train": TrainCommand}, f"python -m {program}", arguments))


def parse(commands: dict[str, Any], program: str, arguments: Sequence[str] | None = None) -> Any:
    """The command that the arguments (by default those of the process) name, with its fields. Prints help if asked.

    Raises InputError with tyro's message, out of its frame, for what cannot be parsed.
    """
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            return tyro.extras.subcommand_cli_from_dict(
                commands,
                prog=program,
                args=list(sys.argv[1:] if arguments is None else arguments) or ["--help"],
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff),
            )
    except SystemExit as ended:
        if not ended.code:
            raise
        # A title, a rule, what is wrong, a rule, and help; in a frame where the terminal can draw one.
        _, message, *_ = [*re.split("^.*(?:───|---).*$", printed.getvalue(), flags=re.MULTILINE), ""]
        message = " ".join(message.replace("│", " ").split())
        raise InputError(f"{message}; see {program} --help") from None


@contextmanager
def one_line_errors() -> Generator[None]:
    """Within it, bad input ends the program with one line and exit code 2, and Ctrl-C with 130."""
    try:
        yield
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def run_training(build: Callable[..., Twin], program: str, command: TrainCommand) -> None:
    """Check everything that can be wrong, then train and report."""
    config, model = command.config, command.config.model
    validate(config)
    both = command.data is not None and command.corpus is not None
    check(not both, f"--data {command.data} and --corpus {command.corpus} both name a text; give one of them")
    check(0 <= command.validation < 1, f"validation is {command.validation}; give a share from 0 up to 1")
    text = read_file(command.data) if command.data else read_corpus(command.corpus or CORPORA[0], command.cache_dir)
    training_text, validation_text = split(text, command.validation, model.window)
    dataset = Dataset(training_text, model.window, config.batch, config.seed)
    check(
        int(text.max()) < model.vocabulary,
        f"vocabulary={model.vocabulary} is too small for bytes up to {text.max()}; give 256",
    )
    devices = SIMULATED_DEVICES if command.devices is None else command.devices
    found = runtime.start(devices, float64="float64" in (model.dtype, model.param_dtype))
    twin = build(config, make_mesh(config.strategy, found.devices if command.devices is None else devices))

    console = Console(highlight=False, soft_wrap=True)
    with ExitStack() as stack:
        file = stack.enter_context(open_output(command.metrics, "--metrics")) if command.metrics else None
        console.print(found.describe())
        console.print(
            f"{program}: {config.strategy} over {dict(twin.mesh.shape)}, "
            f"{find_strategy(config.strategy).summary}; "
            f"{training_text.size:,} bytes to train on, {dataset.batches_per_epoch} batches an epoch"
        )
        state = train(twin, dataset, Reporter(stack, console, file, config.steps))
    if validation_text is None:
        console.print("no validation: the part of the text kept for it is no longer than a window")
        return
    loss, windows = evaluate(twin, state, validation_text)
    check(math.isfinite(loss), f"the validation loss is {loss}; try a lower --learning-rate or --clip 1")
    perplexity = float(np.exp(np.float64(min(loss, 700))))
    console.print(f"validation: loss {loss:.4f}, perplexity {perplexity:.2f}, over {windows} windows")


def finite(value: float | None) -> bool:
    """Whether JSON has a number for it."""
    return value is not None and math.isfinite(value)


def open_output(path: Path, flag: str) -> TextIO:
    """A file to write to, for opening before any long work. Raises InputError naming the flag that gave the path."""
    try:
        return path.open("w")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; give {flag} a path in a folder that exists") from None


class Reporter:
    """Shows records: a bar on a terminal, a line every tenth of the run, and each as a line of JSON."""

    def __init__(self, stack: ExitStack, console: Console, file: TextIO | None, steps: int):
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[last]}"),
        )
        self.bar = stack.enter_context(
            Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        )
        self.task = self.bar.add_task("train", total=steps, last="compiling")
        self.console, self.file, self.steps = console, file, steps

    def __call__(self, record: Record) -> None:
        if self.file:
            values = {name: value if finite(value) else None for name, value in dataclasses.asdict(record).items()}
            print(json.dumps(values, allow_nan=False), file=self.file, flush=True)
        line = (
            f"loss {record.loss:.4f}  perplexity {record.perplexity:.2f}  gradient norm {record.gradient_norm:.3f}"
            + (f"  {record.tokens_per_second:,.0f} tokens/s" if record.tokens_per_second else "")
        )
        self.bar.update(self.task, completed=record.step, last=line)
        if record.step in (1, self.steps) or record.step % max(self.steps // 10, 1) == 0:
            self.console.print(f"step {record.step:>{len(str(self.steps))}}  {line}")
