"""Command line: `python -m bench compare --help`."""

import sys

from bench.compare import CompareCommand, run
from shared.cli import one_line_errors, parse

if __name__ == "__main__":
    with one_line_errors():
        sys.exit(run(parse({"compare": CompareCommand}, "python -m bench")))
