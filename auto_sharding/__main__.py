"""Command line: `python -m auto_sharding train --help`."""

from shared.cli.start import importing

if __name__ == "__main__":
    with importing():
        from auto_sharding import build
        from shared.cli.main import main
    main(build, "auto_sharding")
