"""Command line: `python -m explicit_shardmap train --help`."""

from explicit_shardmap import build
from shared.cli.main import main

if __name__ == "__main__":
    main(build, "explicit_shardmap")
