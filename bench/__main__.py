"""Command line: `python -m bench compare --help`."""

import sys

from shared.cli.start import importing

with importing():
    from bench.comparison import compare
    from bench.docs import command as docs
    from bench.ledger import all_strategies, microbench, one_step
    from bench.mutants import bugs
    from bench.timing import multiprocess
    from shared.cli.main import one_line_errors, run_command

COMMANDS = {
    "compare": (compare.CompareCommand, compare.run),
    "bugs": (bugs.BugsCommand, bugs.run),
    "ledger": (one_step.LedgerCommand, one_step.run),
    "strategies": (all_strategies.StrategiesCommand, all_strategies.run),
    "microbench": (microbench.MicrobenchCommand, microbench.run),
    "docs": (docs.DocsCommand, docs.run),
    "processes": (multiprocess.ProcessesCommand, multiprocess.run),
}
FORMER_NAMES = {"kinds": "microbench"}
"""Of commands, which scripts may have."""

if __name__ == "__main__":
    with one_line_errors():
        named = [FORMER_NAMES.get(argument, argument) for argument in sys.argv[1:2]]
        sys.exit(run_command(COMMANDS, "python -m bench", [*named, *sys.argv[2:]]))
