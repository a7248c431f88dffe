"""Command line: `python -m explicit_shardmap train --help`."""

from shared.cli.start import importing

if __name__ == "__main__":
    with importing():
        from explicit_shardmap import build
        from shared.cli.main import main
    main(build, "explicit_shardmap")
