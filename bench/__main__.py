"""Command line: `python -m bench compare --help`."""

import sys

from bench.comparison import compare
from bench.ledger import all_strategies, microbench, one_step
from bench.mutants import bugs
from bench.timing import multiprocess
from shared.cli.main import one_line_errors, run_command

COMMANDS = {
    "compare": (compare.CompareCommand, compare.run),
    "bugs": (bugs.BugsCommand, bugs.run),
    "kinds": (microbench.KindsCommand, microbench.run),
    "ledger": (one_step.LedgerCommand, one_step.run),
    "strategies": (all_strategies.StrategiesCommand, all_strategies.run),
    "processes": (multiprocess.ProcessesCommand, multiprocess.run),
}

if __name__ == "__main__":
    with one_line_errors():
        sys.exit(run_command(COMMANDS, "python -m bench"))
