"""Command line: `python -m bench compare --help`."""

import sys
from typing import Annotated

import tyro

from bench.compare import CompareCommand, run
from shared.cli import one_line_errors


def compare(command: Annotated[CompareCommand, tyro.conf.arg(name="")]) -> int:
    """Compare the two twins: equality, collectives, and time, for 1, 2, 4 and 8 devices."""
    return run(command)


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(
            tyro.extras.subcommand_cli_from_dict(
                {"compare": compare},
                prog="python -m bench",
                args=sys.argv[1:] or ["--help"],
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff),
            )
        )
