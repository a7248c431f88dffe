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

import jax
import tyro

from shared.cli.checkpoints import InspectCommand, RoundtripCommand, run_inspect, run_roundtrip
from shared.cli.generate import GenerateCommand, run_generate
from shared.cli.start import hand_over
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
"""Name to the flags and to the function that runs (build, program, flags) and returns the exit code."""


def main(build: Callable[..., Twin], program: str, arguments: Sequence[str] | None = None) -> None:
    """Run the command line of one twin. Ends with exit code 2 and one line on bad input."""
    with one_line_errors():
        code = run_command(COMMANDS, f"python -m {program}", arguments, build, program)
    if code:
        sys.exit(code)


def run_command(
    commands: Mapping[str, tuple[Any, Callable[..., int]]],
    program: str,
    arguments: Sequence[str] | None = None,
    *context: Any,
) -> int:
    """Parse the arguments, run the command that they name with (*context, flags), and return its exit code.

    To be called within `one_line_errors`, which catches the interrupt.
    """
    hand_over()
    command = parse({name: kind for name, (kind, _) in commands.items()}, program, arguments)
    run = next(run for kind, run in commands.values() if kind is type(command))
    return run(*context, command)


def parse(commands: Mapping[str, Any], program: str, arguments: Sequence[str] | None = None) -> Any:
    """Return the command that the arguments (by default those of the process) name, with its fields.

    Prints help for --help. Raises InputError with tyro's message for what cannot be parsed.
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
        raise InputError(f"{parser_message(printed.getvalue())}; see {program} --help") from None


def parser_message(printed: str) -> str:
    """Return what tyro printed about wrong arguments as one line; tyro has no interface that gives it.

    It prints a title, the message, a rule and hints: in a frame, or, where the terminal cannot draw one, with a rule
    after the title as well. Of text without rules, all is returned.
    """
    lines = [line.strip(" │") for line in printed.splitlines()]
    framed = any(line.startswith("╭") for line in lines)
    inside = "\n".join(line for line in lines if not line.startswith(("╭", "╰")))
    blocks = [" ".join(block.split()) for block in re.split("^[─-]{3,}$", inside, flags=re.MULTILINE)]
    message = blocks[0] if framed or len(blocks) == 1 else blocks[1]
    return message or "the arguments cannot be parsed"


@contextmanager
def one_line_errors() -> Generator[None]:
    """Context that ends the program with one line: exit code 2 on bad input, 130 on Ctrl-C, 1 on a lost process."""
    try:
        yield
    except InputError as error:
        processes.end(f"error: {error}", 2)
    except KeyboardInterrupt:
        processes.end("interrupted", 130)
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except Exception as error:
        if isinstance(error, OSError) and not processes.is_loss(error):
            processes.end(f"error: {' '.join(str(error).split())}; is there space, and permission to write?", 2)
        if jax.distributed.is_initialized():
            processes.end(processes.explain(error), 1)
        raise
