"""Command line: `python -m bench compare --help`."""

import sys

from bench import between, bugs, compare, kinds, ledger, strategies
from shared.cli import one_line_errors, parse

COMMANDS = {
    "compare": (compare.CompareCommand, compare.run),
    "bugs": (bugs.BugsCommand, bugs.run),
    "kinds": (kinds.KindsCommand, kinds.run),
    "ledger": (ledger.LedgerCommand, ledger.run),
    "strategies": (strategies.StrategiesCommand, strategies.run),
    "processes": (between.ProcessesCommand, between.run),
}

if __name__ == "__main__":
    with one_line_errors():
        command = parse({name: kind for name, (kind, _) in COMMANDS.items()}, "python -m bench")
        sys.exit(next(run for kind, run in COMMANDS.values() if kind is type(command))(command))
