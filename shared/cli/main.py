"""The command line that both twins have: `python -m auto_sharding train ...`, `python -m explicit_shardmap train ...`.

Its flags are the fields of the commands' dataclasses and of those in shared/config.py.
"""

import io
import os
import re
import signal
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any

import tyro

from shared.cli.checkpoints import InspectCommand, RoundtripCommand, run_inspect, run_roundtrip
from shared.cli.generate import GenerateCommand, run_generate
from shared.cli.train import TrainCommand, run_train
from shared.config import InputError
from shared.runtime import processes
from shared.twin import Twin

COMMANDS: Mapping[str, tuple[Any, Callable[..., int]]] = {
    "train": (TrainCommand, run_train),
    "generate": (GenerateCommand, run_generate),
    "inspect": (InspectCommand, run_inspect),
    "roundtrip": (RoundtripCommand, run_roundtrip),
}
"""Name to the flags and to what is run with (build, program, flags), which returns the exit code."""


def main(build: Callable[..., Twin], program: str, arguments: Sequence[str] | None = None) -> None:
    """Run the command line of one twin. Ends with exit code 2 and one line on bad input."""
    with one_line_errors():
        command = parse({name: kind for name, (kind, _) in COMMANDS.items()}, f"python -m {program}", arguments)
        run = next(run for kind, run in COMMANDS.values() if kind is type(command))
        code = run(build, program, command)
    if code:
        sys.exit(code)


def parse(commands: Mapping[str, Any], program: str, arguments: Sequence[str] | None = None) -> Any:
    """The command that the arguments (by default those of the process) name, with its fields. Prints help if asked.

    Raises InputError with tyro's message, out of its frame, for what cannot be parsed.
    """
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            return tyro.extras.subcommand_cli_from_dict(
                dict(commands),
                prog=program,
                args=list(sys.argv[1:] if arguments is None else arguments) or ["--help"],
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
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
    """Within it, bad input ends the program with one line and exit code 2, Ctrl-C with 130, a lost process with 1."""
    try:
        yield
    except InputError as error:
        processes.end(f"error: {error}", 2)
    except KeyboardInterrupt:
        processes.end("interrupted", 130)
    except BrokenPipeError:  # whoever read the output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except Exception as error:
        if isinstance(error, OSError) and not processes.is_loss(error):
            processes.end(f"error: {' '.join(str(error).split())}; is there space, and leave to write?", 2)
        if processes.JOINED:
            processes.end(processes.explain(error), 1)
        raise
