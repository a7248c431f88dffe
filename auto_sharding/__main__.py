"""Command line: `python -m auto_sharding train --help`."""

from auto_sharding import build
from shared.cli.main import main

if __name__ == "__main__":
    main(build, "auto_sharding")
